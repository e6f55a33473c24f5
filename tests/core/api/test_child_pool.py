"""Children that answer within limits; child_module.py is their program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llmcore.api import child_pool
from llmcore.api.child_pool import ChildEnded, ChildPool, Limits, NoChild

LIMITS = Limits(cpu_seconds=10.0, memory_bytes=64 << 20, wall_seconds=60.0)
SHORT = Limits(cpu_seconds=0.05, memory_bytes=64 << 20, wall_seconds=60.0)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@pytest.fixture
def pool() -> ChildPool:
    return ChildPool("child_module", b"hello")


def asked(pool: ChildPool, question: bytes = b"echo x", limits: Limits = LIMITS) -> tuple[int, bytes]:
    """The child's process id, and what it echoes."""
    opening, pid, rest = bytes(pool.answer(question, limits)).split(b" ", 2)
    assert opening == b"hello"
    return int(pid), rest


def idle(pool: ChildPool) -> list[subprocess.Popen[bytes]]:
    return [child._process for child in pool._idle]


def test_one_child_answers_one_question_after_another(pool: ChildPool) -> None:
    pool.warm()
    (process,) = idle(pool)
    large = bytes(3 << 20)
    assert [asked(pool, b"echo " + text) for text in (b"", b"a b", large)] == [
        (process.pid, text) for text in (b"", b"a b", large)
    ]


def test_several_answer_at_once_and_few_are_kept(pool: ChildPool) -> None:
    with ThreadPoolExecutor(4) as threads:
        pids = {pid for pid, _ in threads.map(lambda _: asked(pool), range(40))}
    assert len(pids) <= 4
    assert 1 <= len(idle(pool)) <= child_pool.MOST_IDLE


def test_a_burst_waits_for_the_child_that_is_busy(pool: ChildPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_pool, "SHORT_SECONDS", 60.0)
    pool.warm()
    (process,) = idle(pool)
    with ThreadPoolExecutor(8) as threads:
        assert {pid for pid, _ in threads.map(lambda _: asked(pool), range(80))} == {process.pid}


def test_a_child_that_is_busy_for_long_is_not_waited_for(pool: ChildPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_pool, "SHORT_SECONDS", 0.01)
    pool.warm()
    (process,) = idle(pool)
    with ThreadPoolExecutor(1) as thread:
        burning = thread.submit(pool.answer, b"burn", LIMITS)
        while not pool._busy:
            time.sleep(0.001)
        pid, _ = asked(pool)
        assert pid != process.pid
        assert not burning.done()
        process.kill()
        with pytest.raises(ChildEnded):
            burning.result()
    assert pool._busy == 0


@pytest.mark.parametrize(
    ("question", "limits", "status", "out_of_time"),
    [
        (b"burn", SHORT, -signal.SIGPROF, True),
        (b"grow 300000000", LIMITS, 1, False),
        (b"crash", LIMITS, -signal.SIGSEGV, False),
        (b"exit", LIMITS, 1, False),
    ],
)
def test_what_exceeds_a_limit_or_crashes_ends_its_child_alone(
    pool: ChildPool, question: bytes, limits: Limits, status: int, out_of_time: bool
) -> None:
    before, _ = asked(pool)
    with pytest.raises(ChildEnded) as ended:
        pool.answer(question, limits)
    assert (ended.value.status, ended.value.out_of_time) == (status, out_of_time)
    after, _ = asked(pool)
    assert after != before


def test_the_limit_of_memory_is_the_questions(pool: ChildPool) -> None:
    assert pool.answer(b"grow 300000000", Limits(10.0, 400 << 20, 60.0)) == b"300000000"
    with pytest.raises(ChildEnded):
        pool.answer(b"grow 300000000", LIMITS)


def test_time_between_questions_does_not_count(pool: ChildPool) -> None:
    for _ in range(30):
        asked(pool, limits=SHORT)


def test_a_child_that_does_not_answer_is_killed(pool: ChildPool) -> None:
    pool.warm()
    (process,) = idle(pool)
    with pytest.raises(TimeoutError):
        pool.answer(b"sleep", Limits(10.0, 64 << 20, wall_seconds=0.1))
    assert process.returncode == -signal.SIGKILL and not idle(pool)


def test_a_child_that_keeps_memory_is_replaced(pool: ChildPool) -> None:
    first, _ = asked(pool)
    assert asked(pool, b"keep 1000") == (first, b"1000")
    assert asked(pool, b"keep 40000000") == (first, b"40000000")
    assert asked(pool)[0] != first


def test_a_child_that_was_killed_meanwhile_is_replaced(pool: ChildPool) -> None:
    pool.warm()
    (process,) = idle(pool)
    process.kill()
    process.wait()
    assert asked(pool)[0] != process.pid


@pytest.mark.parametrize(
    ("module", "opening", "why"),
    [
        ("child_module", b"fail", "it ended with exit code 1"),
        ("no_such_module", b"", "it ended with exit code 1"),
        ("child_module", b"wait", r"it did not start within 0\.5 s"),
    ],
)
def test_a_child_that_does_not_start(
    module: str, opening: bytes, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_pool, "START_SECONDS", 0.5 if opening == b"wait" else 60.0)
    with pytest.raises(NoChild, match=f"^{why}$"):
        ChildPool(module, opening).answer(b"", LIMITS)
    assert f"a process of {module} could not be started" in caplog.text


def test_a_child_that_is_killed_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NoChild, match=r"^it was ended by SIGKILL$"):
        ChildPool("child_module", b"").warm()


def test_without_descriptors_no_child_starts(pool: ChildPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(child_pool.socket, "socketpair", none)
    with pytest.raises(NoChild, match=r"cannot be started \(Too many open files\)"):
        pool.warm()


def test_children_end_with_their_pool() -> None:
    pool = ChildPool("child_module", b"hello")
    pool.warm()
    (process,) = idle(pool)
    del pool
    assert process.returncode is not None


PARENT = """
import sys
from llmcore.api.child_pool import ChildPool, Limits

pool = ChildPool("child_module", b"hello")
print(bytes(pool.answer(b"echo", Limits(10.0, 64 << 20, 60.0))).decode().split()[1], flush=True)
sys.stdin.read()
"""


def test_children_end_with_their_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = Path(f"/proc/{int(parent.stdout.readline())}")
    assert child.exists()
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 60.0
    while child.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


UNDER_A_LIMIT = """
import resource
from llmcore.api.child_pool import ChildEnded, ChildPool, Limits

resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
pool = ChildPool("child_module", b"hello")
most = Limits(10.0, 1 << 40, 60.0)
print(bytes(pool.answer(b"grow 1000000", most)).decode())
try:
    pool.answer(b"grow 300000000", most)
except ChildEnded as ended:
    print(ended)
"""


def test_the_operators_own_limit_of_memory_stays() -> None:
    done = subprocess.run([sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "1000000\nit ended with exit code 1\n")


def test_the_stack_has_the_size_that_the_child_asks_for(pool: ChildPool) -> None:
    assert pool.answer(b"stack", LIMITS) == b"%d" % (1 << 20)
