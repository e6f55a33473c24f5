"""Start-up time of the command line: best and median of N runs of `llmcore --help` and `llmcore plugins`.

python benchmarks/cli_start.py [N]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    for arguments in (["--help"], ["plugins"]):
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            command = [sys.executable, "-m", "llmcore.cli", *arguments]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        name = " ".join(["llmcore", *arguments])
        print(f"{name:20} best {min(times):.3f} s, median {statistics.median(times):.3f} s   (target 0.4 s)")


if __name__ == "__main__":
    main()
