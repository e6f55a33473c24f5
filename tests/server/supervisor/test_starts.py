"""Children that hang before their first word, and children that cannot be started at all for a while."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from llmcore_devtools import sockets, write_fake_model
from llmcore_devtools.server import ENGINE_MODULE, FAKE_ENGINE, RunningServer, ServerFailed, serving
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server.supervisor import watchdog

TLS = Path(__file__).parents[2] / "data" / "tls"
WORKER, TERMINATOR, ADMIN = (
    "llmcore_server.http.worker",
    "llmcore_server.http.tls",
    "llmcore_server.http.admin.process",
)

PATIENCE = ("START_SECONDS", "LOADING_SECONDS")
"""The watchdog's constants that `hurried` makes shorter."""

SITE = """
import os, sys, threading, time
from pathlib import Path

def heed():
    while True:
        for name in {names}:
            setattr(watchdog, name, 1.0 if Path({hurry!r}).exists() else 600.0)
        time.sleep(0.02)

if "llmcore_devtools.server" in sys.orig_argv:
    from llmcore_server.supervisor import watchdog
    threading.Thread(target=heed, daemon=True).start()

flag = Path({flag!r})
if flag.exists() and flag.read_text() in sys.orig_argv:
    flag.unlink()
    time.sleep(600)
"""
"""What a Python that finds this as its sitecustomize does: the next process of the module that `flag` names hangs from
its first moment on, and while there is a file `hurry` children may take a second to start, else any time."""


@contextmanager
def hanging(directory: Path, **settings: object) -> Iterator[tuple[RunningServer, Path, Path]]:
    """A server, and the files `flag` and `hurry` for its sitecustomize."""
    assert set(PATIENCE) <= set(vars(watchdog))  # a name that is not there could be set all the same
    flag, hurry, site = directory / "flag", directory / "hurry", directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE.format(flag=str(flag), names=PATIENCE, hurry=str(hurry)))
    paths = [str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        model = write_tokenizer(directory / "model")
        certificate = {"ssl": True, "ssl_certfile": str(TLS / "cert.pem"), "ssl_keyfile": str(TLS / "key.pem")}
        options = {**certificate, "health_monitor": True, "restart_pause": 0.1, **settings}
        with serving(model, engine_module=FAKE_ENGINE, **options) as server:  # type: ignore[arg-type]
            yield server, flag, hurry


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def ready(server: RunningServer) -> bool:
    return sockets.call(server.admin_port, "GET", "/ready")[0] == 200


LATE = {
    WORKER: r"worker-\d+ did not serve within 1 s",
    TERMINATOR: "tls-0 did not serve within 1 s",
    ADMIN: "admin-0 did not serve within 1 s",
    FAKE_ENGINE: "got no further with loading for 1 s",
}
"""The log's words for a child of each module that hangs. On a busy machine others may be late beside it."""


@pytest.mark.slow
def test_who_hangs_while_it_starts_is_killed_and_replaced(tmp_path: Path) -> None:
    with hanging(tmp_path) as (server, flag, hurry):
        for module in (WORKER, TERMINATOR, ADMIN, FAKE_ENGINE):
            known = len(server.log.read_text())
            first = server.children()[module]
            flag.write_text(module)
            os.kill(first, signal.SIGKILL)
            until(lambda: not flag.exists())
            second = server.children()[module]  # before it is killed and replaced, which may be at once
            hurry.touch()
            late = re.compile(LATE[module] + " and is killed")
            until(lambda known=known, late=late: late.search(server.log.read_text()[known:]))
            hurry.unlink()
            until(lambda module=module, no=(None, first, second): server.children().get(module) not in no)
            assert "memory runs out" not in late.split(server.log.read_text()[known:], 1)[1]
            until(lambda: len(server.children()) == 4 and ready(server))
        assert server.stop() == 0


@pytest.mark.parametrize("module", [WORKER, FAKE_ENGINE])
def test_sigterm_ends_promptly_who_hangs_while_it_starts(tmp_path: Path, module: str) -> None:
    with hanging(tmp_path, drain_timeout=60) as (server, flag, _):
        first = server.children()[module]
        flag.write_text(module)
        os.kill(first, signal.SIGKILL)
        until(lambda: not flag.exists())
        os.kill(server.children()[module], signal.SIGSTOP)
        start = time.monotonic()
        assert server.stop(30) == 0
        assert time.monotonic() - start < 25.0


KILLED = """
import os, signal, sys
from pathlib import Path

def die():
    flag.unlink()
    os.kill(os.getpid(), signal.SIGKILL)

module = next((word for word in sys.orig_argv if word.startswith("llmcore_")), "none")
flag = Path({flags!r}) / module
if flag.exists():
    moment = flag.read_text()
    if moment == "at once":
        die()
    sys.addaudithook(lambda event, given: die() if event == "import" and given[0] == moment and flag.exists() else 0)
"""
"""What a Python that finds this as its sitecustomize does: the first process of each module that has a file under
`flags` is killed with SIGKILL when it imports what the file names."""


@contextmanager
def killed_while_starting(directory: Path, moments: dict[str, str]) -> Iterator[Path]:
    """Inside, the first process of each module is killed at its moment; the files of those to come are in the path."""
    flags, site = directory / "flags", directory / "site"
    site.mkdir()
    flags.mkdir()
    for module, moment in moments.items():
        (flags / module).write_text(moment)
    (site / "sitecustomize.py").write_text(KILLED.format(flags=str(flags)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield flags


@pytest.mark.parametrize(
    "moments",
    [
        dict.fromkeys((WORKER, TERMINATOR, ADMIN, FAKE_ENGINE), "at once"),
        dict.fromkeys((WORKER, TERMINATOR, ADMIN, FAKE_ENGINE), "llmcore_server.messages"),
        {WORKER: "llmcore.text.stream", ENGINE_MODULE: "llmcore.engine.build"},
    ],
    ids=["at once", "early", "late"],
)
def test_who_is_killed_while_the_server_starts_is_replaced(tmp_path: Path, moments: dict[str, str]) -> None:
    real = ENGINE_MODULE in moments
    model = write_fake_model(tmp_path / "model") if real else write_tokenizer(tmp_path / "model")
    tls = {"ssl": True, "ssl_certfile": str(TLS / "cert.pem"), "ssl_keyfile": str(TLS / "key.pem")}
    options = {"health_monitor": True, "restart_pause": 0.1, "engine_module": ENGINE_MODULE if real else FAKE_ENGINE}
    with (
        killed_while_starting(tmp_path, moments) as flags,
        serving(model, **options, **(tls if TERMINATOR in moments else {})) as server,  # type: ignore[arg-type]
    ):
        assert list(flags.iterdir()) == []
        log = server.log.read_text()
        for name in [part for module, part in NAMES.items() if module in moments]:
            assert f"{name} was ended by SIGKILL" in log, name
        until(lambda: ready(server))
        if real:
            assert sockets.call(server.port, "POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 2})[0] == 200
        assert server.stop() == 0


NAMES = {
    WORKER: "worker-0",
    TERMINATOR: "tls-0",
    ADMIN: "admin-0",
    FAKE_ENGINE: "the engine",
    ENGINE_MODULE: "the engine",
}
"""What the log calls them."""


def test_without_a_health_monitor_the_death_of_the_engine_ends_a_start(tmp_path: Path) -> None:
    moments = {FAKE_ENGINE: "llmcore_server.messages", WORKER: "at once"}
    with (
        killed_while_starting(tmp_path, moments),
        pytest.raises(ServerFailed, match=r"engine-0 could not start: it was ended by SIGKILL.*give --health_monitor"),
        serving(write_tokenizer(tmp_path / "model"), engine_module=FAKE_ENGINE),
    ):
        raise AssertionError("it started")


def test_workers_that_are_killed_again_and_again_end_a_start(tmp_path: Path) -> None:
    with killed_while_starting(tmp_path, {WORKER: "at once"}) as flags:
        site = tmp_path / "site" / "sitecustomize.py"
        site.write_text(site.read_text().replace("    flag.unlink()\n", ""))
        with (
            pytest.raises(ServerFailed, match=r"worker-2 was ended by SIGKILL.* as all 3 .* in a row"),
            serving(write_tokenizer(tmp_path / "model"), engine_module=FAKE_ENGINE),
        ):
            raise AssertionError("it started")
        assert list(flags.iterdir())


@pytest.mark.slow
def test_who_cannot_be_started_now_is_started_later(tmp_path: Path) -> None:
    with hanging(tmp_path) as (server, _, _):
        pid = server.process.pid
        for module in (WORKER, TERMINATOR, ADMIN, FAKE_ENGINE):
            before = server.children()
            what = {WORKER: "a worker", TERMINATOR: "the end of TLS", ADMIN: "the admin listener"}.get(module)
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, limits[1]))  # fewer than it has
            os.kill(before[module], signal.SIGKILL)
            said = f"{what or 'the engine'} cannot be started: "
            until(lambda said=said: said in server.log.read_text())
            assert module not in server.children()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            until(lambda before=before: set(server.children()) == set(before) and ready(server))
        children = server.children()
        assert set(children) == {WORKER, TERMINATOR, ADMIN, FAKE_ENGINE}
        assert server.stop() == 0
        assert not [pid for pid in children.values() if Path(f"/proc/{pid}").exists()]
