"""When a group of ranks is ended, and the words for it: every limit, on a clock of the test's."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from llmcore_server.messages import Beat
from llmcore_server.supervisor.group import Group, Patience


@dataclass
class Process:
    """A Child as far as a Group looks at it."""

    pid: int
    stopped: bool = False


class Watched:
    """Two ranks that have joined and serve, on the devices cuda:0 and cuda:1. `now`: seconds."""

    def __init__(self, joined: int = 2, ready: bool = True) -> None:
        self.processes = [Process(70), Process(71)]
        self.group = Group("engine-0", self.processes, Patience(), 0.0)  # type: ignore[arg-type]
        self.now = 0.0
        self.states = [(0, "loading"), (0, "loading")]
        self.mute: set[int] = set()
        for rank in range(joined):
            self.beat(rank)
        if ready:
            self.group.ready(self.now)

    def beat(self, rank: int) -> None:
        number, doing = self.states[rank]
        pid = self.processes[rank].pid
        self.group.heard(pid, Beat(pid, number, doing, f"cuda:{rank}"), self.now)

    def after(self, seconds: float) -> str:
        """What is wrong then, after a look and Beats every quarter of a second."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            for rank in {0, 1} - self.mute:
                self.beat(rank)
            if why := self.group.hung(self.now):
                return why
        return ""


def test_ranks_that_wait_and_work_are_well() -> None:
    watched = Watched()
    for number in range(1, 200):
        watched.states = [(number, "waiting"), (number, "launching")]
        assert watched.after(0.5) == ""
    watched.states = [(199, "idle"), (199, "idle")]
    assert watched.after(3600) == ""
    watched.states = [(200, "waiting"), (199, "idle")]
    assert watched.after(9) == "", "only the time counts in which it was behind"


def test_a_rank_that_is_stopped() -> None:
    watched = Watched()
    watched.states = [(7, "waiting"), (7, "launching")]
    assert watched.after(1) == ""
    watched.processes[1].stopped = True
    said = "rank 1 of engine-0 (pid 71, cuda:1) was stopped by a signal 1 s ago; rank 0 waits for the device in step 7"
    assert watched.after(1.5) == said
    watched.processes[1].stopped = False
    assert watched.after(1) == ""


@pytest.mark.parametrize(("doing", "said"), [("launching", "silent"), ("capturing", ""), ("loading", "")])
def test_a_rank_that_is_silent(doing: str, said: str) -> None:
    watched = Watched()
    watched.states = [(7, "capturing"), (7, doing)]
    assert watched.after(1) == ""
    watched.mute = {1}
    assert watched.after(4.5) == ""
    why = watched.after(60)
    assert why == ("rank 1 of engine-0 (pid 71, cuda:1) was silent for 5 s; rank 0 captures in step 7" if said else "")


def test_silence_counts_from_ready() -> None:
    watched = Watched(ready=False)
    watched.states = [(3, "launching"), (3, "launching")]
    assert watched.after(1) == ""
    watched.mute = {0, 1}
    assert watched.after(600) == ""
    watched.group.ready(watched.now)
    assert watched.after(4) == ""
    assert "silent for 5 s" in watched.after(2)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (
            [(9, "waiting"), (9, "launching")],
            "rank 1 of .*: it launches in step 9; rank 0 waits for the device",
        ),
        ([(9, "waiting"), (8, "idle")], "rank 1 of .*: it waits for a plan in step 8; rank 0 waits for the device"),
        ([(9, "launching"), (9, "idle")], "rank 0 of .*: it launches in step 9; rank 1 waits for a plan in step 9"),
        ([(9, "launching"), (9, "launching")], ""),
        ([(9, "waiting"), (9, "waiting")], ""),
        ([(9, "capturing"), (9, "capturing")], ""),
    ],
)
def test_a_rank_that_launches_late(states: list[tuple[int, str]], said: str) -> None:
    watched = Watched()
    watched.states = states
    assert watched.after(9.5) == ""
    why = watched.after(5)
    assert bool(why) == bool(said) and re.match(said, why.replace("has not launched a step within 10 s", ""))


def test_a_rank_that_compiles_before_the_engine_is_ready_is_not_late() -> None:
    watched = Watched(ready=False)
    watched.states = [(9, "waiting"), (9, "launching")]
    assert watched.after(600) == ""
    watched.group.ready(watched.now)
    assert watched.after(9.5) == ""
    assert "has not launched a step within 10 s" in watched.after(1)


def test_a_rank_that_never_joins() -> None:
    watched = Watched(joined=1, ready=False)
    watched.mute = {1}
    assert watched.after(60) == ""
    assert watched.after(1) == "rank 1 of engine-0 (pid 71) has not joined within 60 s; rank 0 loads its model"


def test_beats_of_an_older_group_do_not_count() -> None:
    watched = Watched(joined=1, ready=False)
    watched.mute = {1}
    watched.group.heard(12, Beat(12, 5, "idle", "cuda:1"), 1.0)
    assert "has not joined" in watched.after(70)


def test_the_words_for_a_rank_that_died() -> None:
    watched = Watched()
    watched.states = [(4, "waiting"), (4, "launching")]
    assert watched.after(1) == ""
    assert f"{watched.group.place(1)}: {watched.group.doing(1)}" == (
        "rank 1 of engine-0 (pid 71, cuda:1): it launches in step 4; rank 0 waits for the device in step 4"
    )
    assert watched.group.states == "rank 0 waits for the device in step 4; rank 1 launches in step 4"
