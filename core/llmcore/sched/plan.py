"""A step as the scheduler orders it and the runner executes it: plain data that can be sent to another process.

Row r is `n_query[r]` new tokens of request `request[r]`, an index into the request tables. Decode rows come first
(`n_decode` of them, each the device's last token of its request and the drafts after it that are to be verified), then
chunks of prefill. Among both, rows with fewer tokens come first.

The device decides how many tokens a row gives. Until the host has read that, its length of the request is an upper
bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmcore.api.bridge import SamplingParams
from llmcore.api.protocols import Int32, Int64

MIXED_TOKENS = 512
"""Most tokens of a captured step that is not all decode rows; larger ones keep the device busy while they launch."""

_MIXED_STEP = 64

NONE: Int32 = np.empty(0, np.int32)


class Want(IntFlag):
    """The outputs that a row's request needs from its forward."""

    NOTHING = 0
    SAMPLE = 1
    LOGPROBS = 2
    HIDDEN = 4
    SCORE = 8


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """Device state to set before the step: a request that got its index, or a fork of one that has state."""

    index: int
    tokens: Int32
    """The ids known so far: the prompt, then what the request had produced before a preemption."""
    prompt_len: int
    """The number of them that are the prompt's."""
    start: int
    """The number of them that are in KV already."""
    sampling: SamplingParams
    choice: int
    min_new_tokens: int
    stop_ids: tuple[int, ...]
    fork_of: int = -1
    """The index whose table row it shares, else -1."""
    masked: bool = False
    """Logits processors on the host may change its scores."""


class TableWrites(msgspec.Struct, frozen=True, gc=False):
    """`table[index, at] = granule` in one KV group, elementwise: three columns [K]; a place occurs at most once."""

    index: Int32
    at: Int32
    granule: Int32


class Probe(msgspec.Struct, frozen=True, gc=False):
    """The log-probabilities of `targets`, a prompt's tokens: number i follows new token i of row `row`."""

    row: int
    targets: Int32
    top: int = 0
    """The number of best tokens in the place of each that are wanted beside it."""


class Pool(msgspec.Struct, frozen=True, gc=False):
    """The sum of the normed hidden states of row `row`'s new tokens from number `first` on."""

    row: int
    first: int


class Frame(msgspec.Struct, frozen=True, gc=False):
    """The sizes of the CUDA graph that a step is padded to: rows, tokens, samples. `mixed`: not all rows decode."""

    rows: int
    tokens: int
    samples: int
    mixed: bool


class StepPlan(msgspec.Struct, kw_only=True):
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
    late: Int32 = NONE
    """The samples, by number, that are drawn after the forward, because logits processors have a say in them."""
    frame: Frame | None = None
    """The captured graph that the step may use; None: it runs eagerly."""
    admitted: list[Admitted] = []
    writes: list[TableWrites] = []
    """Per KV group: every table entry that this step needs and the device does not have yet, forks' rows included."""
    copies: list[list[tuple[int, int]]] = []
    """Per KV group, granules (src, dst) to copy before the forward, because other requests still hold src."""
    probes: list[Probe] = []
    """The log-probabilities that are wanted of prompts."""
    pools: list[Pool] = []
    """The hidden states that are wanted of prompts."""

    @property
    def n_tokens(self) -> int:
        """New tokens over all rows."""
        return int(self.n_query.sum())


def _column_bytes(column: Any) -> bytes:
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype not in (np.int32, np.uint8):
        raise TypeError(f"a plan holds columns of int32 and uint8, not {type(column).__name__} {column!r}")
    return column.tobytes()


def _column(kind: Any, data: Any) -> NDArray[Any]:
    return np.frombuffer(data, get_args(get_args(kind)[1])[0])


encode: Callable[[StepPlan], bytes] = msgspec.msgpack.Encoder(enc_hook=_column_bytes).encode
"""A plan as msgpack; columns are little-endian bytes. TypeError for a column of another type than the plan's."""

decode: Callable[[bytes], StepPlan] = msgspec.msgpack.Decoder(StepPlan, dec_hook=_column).decode
"""The plan that `encode` was given; its columns are read-only. Raises msgspec.ValidationError."""


def padded(rows: int) -> int:
    """1, 2, 4, 8, multiples of 8 to 64, of 16 to 256, of 64 above."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // step) * step


def frame_of(plan: StepPlan, most_rows: int) -> Frame | None:
    """The sizes to pad `plan` to if decode steps of at most `most_rows` rows are captured (0: none is); None for a
    step that is not captured."""
    rows, tokens, samples = plan.request.size, plan.n_tokens, plan.sample_row.size
    if not most_rows or plan.probes or plan.pools:
        return None
    if plan.n_decode == rows == samples == tokens:
        size = padded(rows)
        return Frame(size, size, size, mixed=False) if size <= most_rows else None
    if tokens > MIXED_TOKENS:
        return None
    size = 1 << (tokens - 1).bit_length() if tokens <= _MIXED_STEP else -(-tokens // _MIXED_STEP) * _MIXED_STEP
    return Frame(size, size, 1 << (samples - 1).bit_length() if samples else 0, mixed=True)


@dataclass(frozen=True)
class StepResult:
    """The part of a step that the host reads back. S: its samples; T: their tokens, one sample after the other."""

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


Entered = tuple[bytes, Int64, int]
"""(salt, content, start): this content went into the prefix cache under this salt, new from token `start` on."""


@dataclass(slots=True)
class InFlight:
    """A step in flight: its plan, and what it put into the prefix cache."""

    plan: StepPlan
    epochs: Int64
    """Of every row of the request table when the plan was made: a row whose epoch has changed since is another's."""
    entered: list[Entered]
