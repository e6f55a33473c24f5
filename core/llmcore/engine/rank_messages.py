"""The messages between the ranks of one group, which compute every step together. Rank 0 leads, the others follow.

Messages to a rank are handled in order. One that has an `Answer` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from llmcore.api.errors import LlmcoreError
from llmcore.api.protocols import SchedulerLimits

Question = Literal["kv_room", "graph_bytes", "forget_graphs"]
"""`Ask.what`: tokens of KV for which there is room beside `Ask.value` bytes of graphs; bytes of the graphs since the
runner was made; no number, but the runner and its graphs are dropped."""


class RankLost(LlmcoreError):
    """A rank has failed, or cannot compute the same steps. The group cannot go on without it."""


# --- to a rank -------------------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Make the tables of running requests, and take the workspaces of kernels, for these limits. It has an Answer."""

    limits: SchedulerLimits


class Make(msgspec.Struct, frozen=True, tag="make"):
    """Make a runner with KV for `kv_tokens` tokens in every group, instead of the last one. It has an Answer."""

    kv_tokens: int
    graph_bytes: int


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Enqueue a step. `number` counts the steps of a group from 1, those of its start included.

    A step that is captured has an Answer: 1 if that succeeded, else 0.
    """

    number: int
    plan: bytes
    """The step's plan, from `plan.encode`."""
    action: int
    """A graphs.Action."""
    check: int
    """`Prepared.check` on rank 0."""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """The step is captured. `replay`: every rank has captured it, so replay it; else drop the capture and launch."""

    replay: bool


class Limit(msgspec.Struct, frozen=True, tag="limit"):
    """The start is over. From now on wait for another rank for `seconds` at most in each call."""

    seconds: float


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    """The tokens that rank 0 has drawn in step `number`, whose logits processors work on rank 0 alone."""

    number: int
    tokens: bytes
    """[samples] int32, little-endian; -1 is an invalid token."""
    late: tuple[int, ...]
    """Request indices that get no token in this step."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question. It has an Answer."""

    what: Question
    value: int = 0


class End(msgspec.Struct, frozen=True, tag="end"):
    """Rank 0 ends in good order, and so does the receiver."""


ToRank = Begin | Make | Limit | Follow | Go | Drawn | Ask | End


# --- from a rank -----------------------------------------------------------------------------------------------------


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded. Ranks that compute steps together must have equal fields beside their numbers."""

    rank: int
    chosen: Mapping[str, str]
    """The description of an op's context -> the name of its chosen kernel."""
    plugins: str
    """A digest of the plugins and of what they contribute."""
    fingerprint: str
    """A digest of all that decides what a step computes."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to a message; `value` means nothing where the message asked for no number."""

    rank: int
    value: int = 0


class Broke(msgspec.Struct, frozen=True, tag="broke"):
    """The rank has failed in step `number` (0: before any), and ends."""

    rank: int
    number: int
    text: str


FromRank = RankReady | Answer | Broke


# --- the ways that they take -----------------------------------------------------------------------------------------


class Link(Protocol):
    """Rank 0's connection to all other ranks."""

    def send(self, message: ToRank) -> None:
        """Send it to every other rank, without waiting. Raises RankLost for a rank that reads nothing."""

    def gather(self) -> list[RankReady | Answer]:
        """Wait for the next message of every other rank; one of each, in order of rank. Raises RankLost for Broke."""


class Uplink(Protocol):
    """Another rank's connection to rank 0."""

    def receive(self) -> ToRank:
        """Wait for the next message."""

    def send(self, message: FromRank) -> None:
        """Send it, without waiting."""


class Pulse(Protocol):
    """Reports the activity of a rank to the process that watches it."""

    def __call__(self, number: int, doing: Doing) -> None:
        """Note that the rank does this in step `number`."""


Doing = Literal["loading", "idle", "launching", "capturing", "waiting"]
"""Loading the model; waiting for a plan; enqueuing a step; capturing it, which may keep every thread of the rank for
long; waiting for the device."""


def difference(leads: RankReady, follows: RankReady) -> str:
    """The first difference between two ranks and its fix, or ""."""
    pair = f"rank {follows.rank} cannot compute steps together with rank {leads.rank}"
    for what in sorted({*leads.chosen, *follows.chosen}):
        mine, its = leads.chosen.get(what, "none"), follows.chosen.get(what, "none")
        if mine != its:
            op = what.partition(" ")[0]
            fix = f"install the same plugins for both, or pin one with --kernel {op}={mine if mine != 'none' else its}"
            return f"{pair}: {what} is computed by kernel {its} there and by {mine} here; {fix}"
    if leads.plugins != follows.plugins:
        return f"{pair}: it has other plugins, or other versions of them; install the same ones for both"
    if leads.fingerprint != follows.fingerprint:
        return f"{pair}: its model has another layout of KV, quantization or revision; give both the same files"
    return ""
