"""Commands and servers of a clean environment, for the scripts that check wheels."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

START_SECONDS = 300
READY = re.compile(r"^serving at: (http://\S+)$", re.MULTILINE)


def run(*command: object, cwd: Path | None = None) -> str:
    """Standard output of a command that must succeed."""
    done = ended(*command, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(done.args)}\n{done.stdout}{done.stderr}"
    return done.stdout


def ended(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command that has ended, whatever its exit code."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environment(), timeout=600, check=False)


def environment() -> dict[str, str]:
    """This one without what would lead to the tree that was built."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LLMCORE_PLUGINS")}


def fetched(address: str, body: Mapping[str, Any] | None = None) -> str:
    """The text that a server answers to a GET, or to a POST of `body`."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(address, data, {"Content-Type": "application/json"}), timeout=120) as reply:
        text: str = reply.read().decode()
    return text


@contextmanager
def serving(llmcore: Path, model: Path, log: Path, *options: str) -> Iterator[str]:
    """The URL of `llmcore serve`, which is ended when the block is left; its log says where it listens."""
    command = [str(llmcore), "serve", "--model_dir", str(model), "--host", "127.0.0.1", "--port", "0", *options]
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, cwd=model, env=environment()) as server,
    ):
        try:
            yield _wait_for(server, log)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(20)
    assert code == 0, f"the server ended with exit code {code}:\n{log.read_text()}"


def _wait_for(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        if found := READY.search(log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"the server does not start:\n{log.read_text()}")
