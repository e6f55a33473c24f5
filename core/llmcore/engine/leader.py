"""Rank 0 of a group: a runner that has the other ranks do every step with it.

The scheduler, the logits processors and all that clients see are on rank 0 alone. Each rank picks a step's tokens
itself, from the same numbers and the same keys of a counter-based generator, so that tokens are equal without being
sent. Rank 0 sends the tokens of a step whose draw waited for logits processors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from llmcore.api.errors import ConfigError, reraise_if_stopping
from llmcore.api.protocols import SchedulerLimits
from llmcore.engine.graphs import Action
from llmcore.engine.model_runner import GroupKV, Launched, ModelRunner, Prepared
from llmcore.engine.rank_messages import (
    Answer,
    Ask,
    Begin,
    Drawn,
    End,
    Follow,
    Go,
    Limit,
    Link,
    Make,
    Pulse,
    Question,
    RankReady,
    difference,
)
from llmcore.engine.token_masks import Outcome
from llmcore.layers.mesh import Mesh
from llmcore.sched.plan import StepPlan, StepResult, encode
from llmcore.sched.processors import Steered

_BROKEN = "a step failed that other ranks had begun, and a group of ranks cannot repeat it"


class Runner(Protocol):
    """Executes plans for the engine: a ModelRunner, alone or with other ranks."""

    unrepeatable: str

    @property
    def groups(self) -> Sequence[GroupKV]:
        """The pools of each KV group on this rank."""

    @property
    def graph_rows(self) -> int:
        """Most rows of a captured decode step."""

    @property
    def graphs(self) -> int:
        """The number of captured steps."""

    def prepare(self, plan: StepPlan) -> Prepared:
        """See ModelRunner."""

    def enqueue(self, step: Prepared) -> Launched:
        """See ModelRunner."""

    def draw(self, step: Launched, steered: Sequence[Steered]) -> Outcome:
        """See ModelRunner."""

    def read(self, step: Launched) -> StepResult:
        """See ModelRunner."""


class Leader:
    """A Runner around rank 0's own. `numbers` counts the steps of the group."""

    def __init__(self, runner: ModelRunner, link: Link, pulse: Pulse, numbers: Iterator[int]) -> None:
        self.unrepeatable = ""
        self._runner = runner
        self._link = link
        self._pulse = pulse
        self._numbers = numbers
        self._number = 0
        self._untold: tuple[Launched, list[int]] | None = None
        """A step whose tokens the other ranks wait for, and its late requests."""

    @property
    def groups(self) -> Sequence[GroupKV]:
        """The pools of each KV group on rank 0."""
        return self._runner.groups

    @property
    def graph_rows(self) -> int:
        """Most rows of a captured decode step."""
        return self._runner.graph_rows

    @property
    def graphs(self) -> int:
        """The number of captured steps."""
        return self._runner.graphs

    def prepare(self, plan: StepPlan) -> Prepared:
        """Pack a step. Nothing has been sent yet, so one that fails here can be repeated."""
        return self._runner.prepare(plan)

    def enqueue(self, step: Prepared) -> Launched:
        """Have every rank enqueue a step. Raises RankLost, and what the model raises on rank 0."""
        with self._together():
            self._tell_tokens()
            self._number = next(self._numbers)
            action = self._runner.decide(step)
            self._pulse(self._number, "capturing" if action == Action.CAPTURE else "launching")
            self._link.send(Follow(self._number, encode(step.plan), int(action), step.check))
            launched = self._runner.enqueue(step, action, self._agree)
            self._pulse(self._number, "idle")
            return launched

    def draw(self, step: Launched, steered: Sequence[Steered]) -> Outcome:
        """Enqueue the draw of a step on rank 0. The other ranks get its tokens before the next step."""
        with self._together():
            outcome = self._runner.draw(step, steered)
            self._untold = (step, outcome.late)
            return outcome

    def read(self, step: Launched) -> StepResult:
        """Wait for an enqueued step. Raises what the device raises."""
        with self._together():
            self._tell_tokens()
            self._pulse(self._number, "waiting")
            result = self._runner.read(step)
            self._pulse(self._number, "idle")
            return result

    def _tell_tokens(self) -> None:
        """Send the tokens of the last draw, once they are there."""
        if self._untold is None:
            return
        (step, late), self._untold = self._untold, None
        step.event.wait()
        self._link.send(Drawn(self._number, step.columns["tokens"].numpy().astype("<i4").tobytes(), tuple(late)))

    def _agree(self, captured: bool) -> bool:
        """True if every rank has captured the step; all hear of it."""
        everywhere = bool(min(_values(self._link), default=1)) and captured
        self._link.send(Go(everywhere))
        return everywhere

    @contextmanager
    def _together(self) -> Iterator[None]:
        """An exception inside leaves the ranks in different states."""
        try:
            yield
        except BaseException as error:
            reraise_if_stopping(error)
            self.unrepeatable = _BROKEN
            raise


class Ranks(Protocol):
    """The ranks that build an engine, as rank 0 sees them."""

    mesh: Mesh
    """The part of the model that rank 0 has."""

    def join(self, ready: RankReady) -> None:
        """Wait until every rank has loaded its model. Raises ConfigError for one that is not like rank 0, `ready`."""

    def begin(self, limits: SchedulerLimits) -> None:
        """Have every other rank make its tables and take its workspaces."""

    def runner(self, runner: ModelRunner, kv_tokens: int, graph_bytes: int) -> Runner:
        """A runner for all ranks; `runner` is rank 0's, and the sizes are its own."""

    def set_limit(self, seconds: float) -> None:
        """End the start: from now on no rank waits for another one for more than `seconds` in a call."""

    def least(self, what: Question, mine: int, value: int = 0) -> int:
        """The least of all ranks' answers and `mine`."""

    def most(self, what: Question, mine: int, value: int = 0) -> int:
        """The greatest of all ranks' answers and `mine`."""


class Alone:
    """The ranks of a group of one. Its methods tell no other rank."""

    mesh = Mesh()

    def join(self, ready: RankReady) -> None:
        """No rank joins."""

    def begin(self, limits: SchedulerLimits) -> None:
        """No other rank has tables."""

    def runner(self, runner: ModelRunner, kv_tokens: int, graph_bytes: int) -> Runner:
        """The runner itself."""
        return runner

    def set_limit(self, seconds: float) -> None:
        """No rank waits."""

    def least(self, what: Question, mine: int, value: int = 0) -> int:
        """`mine`."""
        return mine

    def most(self, what: Question, mine: int, value: int = 0) -> int:
        """`mine`."""
        return mine


class Led:
    """Ranks of a group of several, behind `link`. `pulse` hears what rank 0 does, which has the part `mesh` of the
    model."""

    def __init__(self, link: Link, pulse: Pulse, mesh: Mesh | None = None) -> None:
        self.mesh = mesh or Mesh()
        self._link = link
        self._pulse = pulse
        self._numbers = iter(range(1, 1 << 62))

    def join(self, ready: RankReady) -> None:
        """Wait until every rank has loaded its model. Raises ConfigError for one that is not like rank 0, `ready`."""
        for other in self._link.gather():
            if not isinstance(other, RankReady):
                raise TypeError(f"a rank that loads its model has sent {other!r}")
            if wrong := difference(ready, other):
                raise ConfigError(wrong)

    def begin(self, limits: SchedulerLimits) -> None:
        """Have every other rank make its tables and take its workspaces."""
        self._link.send(Begin(limits))
        _values(self._link)

    def runner(self, runner: ModelRunner, kv_tokens: int, graph_bytes: int) -> Runner:
        """A Leader around rank 0's runner, once every other rank has one of the same sizes."""
        self._link.send(Make(kv_tokens, graph_bytes))
        _values(self._link)
        return Leader(runner, self._link, self._pulse, self._numbers)

    def set_limit(self, seconds: float) -> None:
        """End the start: from now on no rank waits for another one for more than `seconds` in a call."""
        self._link.send(Limit(seconds))
        self.mesh.set_limit(seconds)

    def least(self, what: Question, mine: int, value: int = 0) -> int:
        """The least of all ranks' answers and `mine`."""
        return min(mine, *self._ask(what, value))

    def most(self, what: Question, mine: int, value: int = 0) -> int:
        """The greatest of all ranks' answers and `mine`."""
        return max(mine, *self._ask(what, value))

    def end(self) -> None:
        """Have every other rank end in good order."""
        self._link.send(End())

    def _ask(self, what: Question, value: int) -> list[int]:
        self._link.send(Ask(what, value))
        return _values(self._link)


def _values(link: Link) -> list[int]:
    """The next answers of all other ranks."""
    answers = []
    for answer in link.gather():
        if not isinstance(answer, Answer):
            raise TypeError(f"a rank that was asked has sent {answer!r}")
        answers.append(answer.value)
    return answers
