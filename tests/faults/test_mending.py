"""What cannot be mended by starting a process again ends the server, with what happened and what to do."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import MakeHouse
from harness import PATIENCE, House
from llmcore_devtools.server import ENGINE_MODULE

WORKER = "llmcore_server.http.worker"


def run_directory(pid: int) -> Path:
    """Where a running server keeps its sockets."""
    files = (Path(os.readlink(file)) for file in Path(f"/proc/{pid}/fd").iterdir())
    (directory,) = (file.parent for file in files if file.name == "lock")
    return directory


def delete_directory(house: House) -> None:
    """As a cleaner of /tmp does; who is connected goes on."""
    shutil.rmtree(run_directory(house.server.process.pid))
    for _ in range(3):
        assert house.text([1, 2], 3)


@pytest.mark.parametrize(("module", "who"), [(WORKER, "worker-0"), (ENGINE_MODULE, "the engine")])
def test_who_dies_after_the_run_directory_was_deleted_ends_the_server(
    make_house: MakeHouse, module: str, who: str
) -> None:
    with make_house(health_monitor=True, restart_pause=0.1, restart_limit=0) as house:
        delete_directory(house)
        os.kill(house.server.children()[module], signal.SIGKILL)
        assert house.server.process.wait(PATIENCE) == 1
        log = house.server.log.read_text()
    assert "was deleted: nothing that dies can be replaced any more" in log
    assert f"ServerError: {who} was ended by SIGKILL" in log and "; start the server again, and keep what" in log
    assert "starting another" not in log and "Traceback" not in log


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`llmcore testserver` once it serves; and what its standard error is shown on."""
    shown, terminal = pty.openpty()
    command = [sys.executable, "-m", "llmcore.cli", "testserver", "--port", "0", *arguments]
    environment = {**os.environ, "COLUMNS": "300", "TERM": "dumb"}
    process = subprocess.Popen(command, stderr=terminal, stdout=subprocess.DEVNULL, env=environment)
    os.close(terminal)
    try:
        said = b""
        while b"serving at" not in said:
            said += os.read(shown, 1 << 16)
        yield process, shown
    finally:
        process.kill()
        process.wait()
        os.close(shown)


def rest(terminal: int) -> str:
    """What still comes."""
    said = b""
    try:
        while more := os.read(terminal, 1 << 16):
            said += more
    except OSError:  # nobody has the other end any more
        pass
    return said.decode()


def test_the_end_is_a_panel_on_a_terminal() -> None:
    with on_a_terminal("--disable_admin") as (server, terminal):
        directory = run_directory(server.pid)
        shutil.rmtree(directory)
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        (worker,) = (int(pid) for pid in children if WORKER in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(worker, signal.SIGKILL)
        said = rest(terminal)
        assert server.wait(PATIENCE) == 1
    assert "llmcore failed" in said and "cause" in said and "fix" in said
    assert f"{directory} was deleted" in said and "start the server again" in said
    assert "Traceback" not in said


REFUSES = """
from pathlib import Path
from llmcore.api import ConfigError, hookimpl

@hookimpl
def on_startup():
    if Path({flag!r}).exists():
        raise ConfigError("the licence has run out; get another")
"""


def test_workers_that_cannot_start_any_more_end_the_server(make_house: MakeHouse, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    (tmp_path / "refuses.py").write_text(REFUSES.format(flag=str(flag)))
    with make_house(plugins=(str(tmp_path / "refuses.py"),)) as house:
        flag.touch()
        start = time.monotonic()
        os.kill(house.server.children()[WORKER], signal.SIGKILL)
        assert house.server.process.wait(PATIENCE) == 1
        log = house.server.log.read_text()
    assert time.monotonic() - start > 2.0, "they were started without a pause"
    assert log.count("starting another") == 3
    assert "ServerError: worker-3 failed: the licence has run out; get another (log: " in log
    assert "as all 3 that were started in a row; mend its cause, and start the server again" in log
