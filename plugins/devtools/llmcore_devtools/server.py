"""A real server for tests: the supervisor and all its processes, on a free port of loopback.

with serving(write_fake_model(tmp_path)) as server:
    urllib.request.urlopen(f"{server.url}/v1/models")
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from llmcore.api.errors import ConfigError, LlmcoreError
from llmcore.config import Config, child_environment
from llmcore.config.process import die_with_parent
from llmcore.registry.loader import configure
from llmcore_server.logs import log_to_stderr
from llmcore_server.settings import Logging
from llmcore_server.supervisor import Grouping, Notices, Pace, serve
from llmcore_server.supervisor.supervisor import ENGINE_MODULE

from llmcore_devtools.faults import with_faults

FAKE_ENGINE = "llmcore_devtools.fake_engine"
"""An engine that echoes prompts. It starts at once and needs only a tokenizer."""


BRISK = Pace(engine=0.05, workers=0.05)
"""Short intervals for tests, so that they need not wait for figures."""


class ServerFailed(Exception):
    """The server did not start. The text is the server's output."""


class _Order(msgspec.Struct):
    """The input of the server process."""

    config: Config
    engine_module: str
    parent: int
    pace: Pace
    grouping: Grouping


@dataclass
class RunningServer:
    """A server that accepts requests.

    `log`: the output of all its processes. `temporary`: the folder of its temporary files. `admin`: the URL of the
    admin listener.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    temporary: Path
    admin: str = ""

    @property
    def admin_port(self) -> int:
        """The port of the admin listener, on 127.0.0.1."""
        return int(self.admin.rpartition(":")[2])

    @property
    def port(self) -> int:
        """The server's port, on 127.0.0.1."""
        return int(self.url.rpartition(":")[2])

    def children(self) -> dict[str, int]:
        """Module ("llmcore_server.http.worker") -> process id. A module's second process has the suffix #2."""
        found: dict[str, int] = {}
        for pid in _children_of(self.process.pid):
            module = _command(pid).partition("-m\0")[2].partition("\0")[0]
            name = next(n for n in (module, *(f"{module}#{i}" for i in range(2, 99))) if n not in found)
            found[name] = pid
        return found

    def stop(self, timeout: float = 30.0) -> int:
        """Send SIGTERM and return the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


@contextmanager
def serving(
    model_dir: Path,
    *,
    engine_module: str = ENGINE_MODULE,
    plugin_options: Mapping[str, Any] | None = None,
    timeout: float = 180.0,
    faults: bool = False,
    pace: Pace = BRISK,
    grouping: Grouping | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """A server of the model in `model_dir`, with `settings` as on the command line. It ends with the block.

    `faults`: requests may cause the faults of `llmcore_devtools.faults`, if the model was written with
    `all_faults`. `pace`: the intervals at which it updates its figures.
    `grouping`: the ranks of each engine. Raises
    ServerFailed if it does not accept requests within `timeout` seconds.
    """
    config, _ = configure(
        **{"model_dir": str(model_dir), "host": "127.0.0.1", "port": 0, "drain_timeout": 5, **settings}
    )
    config = replace(config, plugin_options={**config.plugin_options, **(plugin_options or {})})
    if faults:
        config = with_faults(config)
    with tempfile.TemporaryDirectory() as scratch:
        log, temporary = Path(scratch) / "log", Path(scratch) / "tmp"
        temporary.mkdir()
        process, ready = _start(
            _Order(config, engine_module, os.getpid(), pace, grouping or Grouping()), log, temporary
        )
        try:
            url, _, dashboard = _await_urls(process, ready, log, timeout).partition(" ")
            yield RunningServer(url, process, log, temporary, dashboard.removesuffix("/dashboard"))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(12)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _start(order: _Order, log: Path, temporary: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The server's process, and a descriptor to read its URLs from."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as file, log.open("wb") as out:
        file.write(msgspec.msgpack.encode(order))
        file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "llmcore_devtools.server", str(file.fileno()), str(writer)],
            pass_fds=(file.fileno(), writer),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**child_environment(), "TMPDIR": str(temporary)},
        )
    os.close(writer)
    return process, reader


def _await_urls(process: subprocess.Popen[bytes], ready: int, log: Path, timeout: float) -> str:
    os.set_blocking(ready, False)
    deadline = time.monotonic() + timeout
    with os.fdopen(ready, "rb", buffering=0) as pipe:
        while time.monotonic() < deadline and process.poll() is None:
            if urls := pipe.read():
                return urls.decode()
            time.sleep(0.02)
    raise ServerFailed(log.read_text(errors="replace"))


def _children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has just ended
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return sorted(found)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # the process has just ended


def main() -> int:
    """The server process."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        order = msgspec.msgpack.decode(file.read(), type=_Order)
    die_with_parent(order.parent)
    log_to_stderr(order.config.section(Logging), "supervisor")
    writer = int(sys.argv[2])
    notices = Notices(ready=lambda url, facts: _write_all(writer, f"{url} {dict(facts.report).get('dashboard', '')}"))
    try:
        return serve(
            order.config,
            notices,
            engine_module=order.engine_module,
            pace=order.pace,
            grouping=order.grouping,
        )
    except LlmcoreError as error:
        logging.getLogger("llmcore").error("%s: %s", type(error).__name__, error)
        return 2 if isinstance(error, ConfigError) else 1


def _write_all(writer: int, text: str) -> None:
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(text.encode())


if __name__ == "__main__":
    sys.exit(main())
