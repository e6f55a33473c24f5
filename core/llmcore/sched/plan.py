"""A step as the scheduler orders it and the runner executes it: columns, no torch.

Row r is `n_query[r]` new tokens of request `request[r]`, an index into the request tables. Decode rows come first
(`n_decode` of them, each the device's last token of its request and the drafts after it that are to be verified), then
chunks of prefill. Among both, rows with fewer tokens come first.

The device decides how many tokens a row gives. Until the host has read that, its length of the request is an upper
bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from llmcore.bridge import SamplingParams
from llmcore.protocols import Int32
from llmcore.sched.processors import ChoiceProcessors


class Want(IntFlag):
    """What a row's request needs from its forward."""

    NOTHING = 0
    SAMPLE = 1
    LOGPROBS = 2
    HIDDEN = 4


@dataclass(frozen=True)
class Admitted:
    """Device state to set before the step: a request that got its index, or a fork of one that has state.

    `tokens` are the ids known so far (prompt, then what it had produced before a preemption); `prompt_len` of them
    are the prompt's and `start` of them are in KV already. `fork_of`: the index whose table row it shares, else -1.
    `bound`: its logits processors.
    """

    index: int
    tokens: Int32
    prompt_len: int
    start: int
    sampling: SamplingParams
    choice: int
    min_new_tokens: int
    stop_ids: tuple[int, ...]
    fork_of: int = -1
    bound: ChoiceProcessors | None = None


@dataclass(frozen=True)
class TableWrites:
    """`table[index, at] = granule` in one KV group, elementwise: three columns [K]; a place occurs at most once."""

    index: Int32
    at: Int32
    granule: Int32


@dataclass(frozen=True)
class Probe:
    """The log-probabilities of `targets`, a prompt's tokens, after the first so many new tokens of row `row`."""

    row: int
    targets: Int32
    top: int = 0
    """How many of the best tokens in the place of each are wanted beside it."""


@dataclass(frozen=True)
class Pool:
    """The sum of the normed hidden states of row `row`'s new tokens from number `first` on."""

    row: int
    first: int


@dataclass
class StepPlan:
    """One step. All arrays are parallel over rows except where noted."""

    number: int
    request: Int32
    n_query: Int32
    start: Int32
    """Computed tokens of each row before this step: an upper bound for rows that decode, exact for chunks."""
    reserve: Int32
    """Slots that each row holds in every KV group for its new tokens, up to `start + n_query`: an upper bound, because
    the tokens may begin before `start`."""
    want: NDArray[np.uint8]
    n_decode: int
    sample_row: Int32
    """[S] the row of each sample; a final chunk is named once per choice it forks into."""
    sample_request: Int32
    """[S] the request index that receives it."""
    admitted: list[Admitted] = field(default_factory=list)
    writes: list[TableWrites] = field(default_factory=list)
    """Per KV group: every table entry that this step needs and the device does not have yet, forks' rows included."""
    copies: list[list[tuple[int, int]]] = field(default_factory=list)
    """Per KV group, granules (src, dst) to copy before the forward, because somebody else still holds src."""
    probes: list[Probe] = field(default_factory=list)
    """What is wanted of prompts beside samples."""
    pools: list[Pool] = field(default_factory=list)
    """Whose hidden states are wanted."""

    @property
    def n_tokens(self) -> int:
        """New tokens over all rows."""
        return int(self.n_query.sum())


@dataclass(frozen=True)
class StepResult:
    """What the host reads back of a step. S: its samples; T: the tokens of all of them, one sample after the other."""

    tokens: Int32
    """[T]"""
    finite: NDArray[np.bool_]
    """[S] False where the row's logits held NaN or infinity, or what was drawn is not a token; its tokens then mean
    nothing."""
    counts: Int32 | None = None
    """[S] tokens of each sample: from none to all that its row could give. None: one of each, and S is T."""
    logprobs: NDArray[np.float32] | None = None
    """[T] of the tokens; present when any sampled request asked."""
    top_ids: Int32 | None = None
    """[T, k] the best tokens in the place of each, best first."""
    top_logprobs: NDArray[np.float32] | None = None
    """[T, k]"""
    scores: NDArray[np.float32] | None = None
    """[S, n] of a model that scores; its tokens mean nothing, and each ends its request."""
    probed: NDArray[np.float32] | None = None
    """[L] what the plan's probes asked for, one after the other."""
    probed_ranks: Int32 | None = None
    """[L]"""
    probed_top_ids: Int32 | None = None
    """[L, k] the best tokens in these places, best first, as many as the probe that wants most."""
    probed_top_logprobs: NDArray[np.float32] | None = None
    """[L, k]"""
    pooled: NDArray[np.float32] | None = None
    """[pools, hidden size] of the plan's pools."""
