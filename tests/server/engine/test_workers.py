"""Workers that keep up get their events; one that is silent, behind or dead loses its requests and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from llmcore.api.bridge import Finish, Prompt, StepEvents, Submit
from llmcore_server.engine import workers
from llmcore_server.engine.workers import BEHIND_BYTES, Workers
from llmcore_server.messages import EngineToWorker, Mailbox

Box = Mailbox[EngineToWorker]


class Rig:
    """Two workers' mailboxes, a clock that the test moves, and what was aborted."""

    def __init__(self, directory: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.now = 100.0
        self.aborted: list[tuple[int, int]] = []
        self.boxes: list[Box] = [Mailbox(context, f"ipc://{directory}/w{i}", EngineToWorker) for i in range(2)]
        self.workers = Workers(context)
        for owner, box in enumerate(self.boxes):
            self.workers.add(owner, box.endpoint)
            self.workers.began(owner, Submit(id=7, prompt=Prompt.of([]), max_new_tokens=1, n=2))

    def abort(self, request: int, owner: int) -> None:
        self.aborted.append((request, owner))

    def post(self, *owners: int, finish: Finish = Finish.RUNNING) -> None:
        for owner in owners:
            event = StepEvents(stamp=self.now, request=[7], choice=[0], count=[1], tokens=[1], finish=[int(finish)])
            self.workers.post({owner: event})

    def look(self, seconds: float) -> None:
        """Time passes, and the engine looks after its workers as often as it does between steps."""
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.workers.drop_late(self.abort)

    def received(self, owner: int) -> list[StepEvents]:
        assert self.boxes[owner].wait(30)
        return [message for message in self.boxes[owner].drain() if isinstance(message, StepEvents)]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rig = Rig(tmp_path, context)
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: rig.now))
    rig.workers.drop_late(rig.abort)  # from here on the test's clock counts
    for owner in range(2):
        rig.workers.heard(owner, 0.0)
    yield rig
    rig.workers.close()
    for box in rig.boxes:
        box.close()
    context.term()


def test_each_worker_gets_its_own(rig: Rig) -> None:
    rig.post(0, 1)
    assert [rig.received(owner)[0].tokens for owner in range(2)] == [[1], [1]]
    rig.workers.drop_late(rig.abort)
    assert rig.aborted == []


def test_a_silent_worker_loses_its_requests(rig: Rig) -> None:
    rig.look(1.0)
    rig.workers.heard(1, 0.0)
    rig.look(0.5)
    assert rig.aborted == [(7, 0)]
    (last,) = rig.received(0)
    assert (last.request, last.choice, last.finish) == ([7, 7], [0, 1], [int(Finish.ABORT)] * 2)
    rig.workers.drop_late(rig.abort)
    assert rig.aborted == [(7, 0)]


def test_a_worker_behind_its_steps_loses_its_requests(rig: Rig) -> None:
    for _ in range(4):
        rig.post(0, 1)
        rig.look(0.5)
        rig.workers.heard(0, 0.0)
        rig.workers.heard(1, rig.now)
    assert rig.aborted == [(7, 0)]


def test_a_stall_of_the_engine_is_nobodys_silence(rig: Rig) -> None:
    rig.post(0)
    for _ in range(3):
        rig.now += 60
        rig.workers.drop_late(rig.abort)
    assert rig.aborted == []
    rig.look(1.0)
    assert rig.aborted == [(7, 0), (7, 1)]


def test_bytes_count_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.Outlet, "send", lambda self, message: 0)
    rig.post(0)
    assert rig.workers._workers[0].unseen_bytes == BEHIND_BYTES
    rig.post(0)
    rig.workers.drop_late(rig.abort)
    assert rig.aborted == [(7, 0)]


def test_what_ended_is_not_ended_again(rig: Rig) -> None:
    rig.post(0, finish=Finish.STOP)
    rig.workers.ended(0, 7, 1)
    rig.workers.ended(1, 7)
    rig.look(9)
    assert rig.aborted == []


def test_a_dead_worker(rig: Rig) -> None:
    rig.workers.remove(0, rig.abort)
    assert rig.aborted == [(7, 0)]
    rig.post(0)
    rig.workers.heard(0, rig.now)
    rig.workers.remove(0, rig.abort)
    assert rig.aborted == [(7, 0)]
