"""Latent attention's prefill: absorbed or expanded, whichever is cheaper, and how a cached prefix is cut into pieces.

Absorbed, queries attend to the latent rows themselves, which are wide. Expanded, the rows of every token seen are
first made into keys and values of every head, which are narrow: cheaper from some hundred queries per row on
(arXiv:2405.04434, section 2.1, has both forms).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from llmcore.layers.step import Step
from llmcore.protocols import AttentionKernel, AttnLimits, AttnRows, Int32, MetaWriter

PREFIX_TOKENS = 8192
"""Most cached tokens of all rows that are expanded at a time."""


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Elements: of a head's key without (`plain`) and with rope (`rotated`), of its value, of the latent."""

    heads: int
    plain: int
    rotated: int
    value: int
    latent: int

    def costs(self, n_query: Int32, kv_len: Int32) -> tuple[int, int]:
        """Multiplications per head of a step's prefill rows (absorbed, expanded), half of what is causal."""
        new, prefix = n_query.astype(np.int64), kv_len.astype(np.int64) - n_query
        scores = int((new * prefix + new * new // 2).sum())
        up = self.latent * (self.plain + self.value)
        absorbed = int(new.sum()) * up + scores * (2 * self.latent + self.rotated)
        expanded = int(new.sum() + prefix.sum()) * up + scores * (self.plain + self.rotated + self.value)
        return absorbed, expanded


@dataclass
class Room:
    """What a step may take, shared by a group's kernels: no more than the largest prompt that is expanded whole.

    `tokens`: of the largest step, None where nobody said. Such a step is run once at the start and measured; a
    cached prefix and absorbed queries are kept to what that took.
    """

    sizes: LatentSizes
    tokens: int | None = None

    def take(self, tokens: int) -> None:
        """Note the largest step of one kernel."""
        self.tokens = max(tokens, self.tokens or 0)

    @property
    def most(self) -> int:
        """Elements per head that are held at once: queries, keys and values as they come and as they are used."""
        n = self.sizes
        return (self.tokens or 0) * (3 * n.plain + 2 * n.rotated + 2 * n.value)

    def piece(self, tokens: int) -> int:
        """Most cached tokens expanded at a time in a step of `tokens`."""
        if self.tokens is None:
            return PREFIX_TOKENS
        n = self.sizes
        left = self.most - tokens * (n.plain + n.rotated + 2 * n.value)
        each = 2 * n.plain + n.rotated + n.value + -(-2 * (n.latent + n.rotated) // n.heads)
        return max(min(PREFIX_TOKENS, left // each), 1)

    @property
    def absorbed(self) -> int | None:
        """Most tokens of a step whose queries are absorbed; None where nobody said."""
        n = self.sizes
        return None if self.tokens is None else self.most // (n.plain + 2 * n.rotated + 2 * n.latent)


@dataclass(frozen=True)
class _Cut:
    """At most `tokens` cached ones of the rows `first` to `last` (exclusive), whose tokens are `queries` of the step.

    `segments`: where these rows' are in what `cut` lists. `longest`: most queries and most keys of a row.
    """

    first: int
    last: int
    tokens: int
    queries: slice
    segments: slice
    longest: tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """Cached tokens that are expanded together, and the queries that see them all.

    `slots` [L] int32, where they are; `q_start`, `k_start` [R + 1] int32, the borders of R rows in `queries` and in
    `slots`; past the last border are slots of no row. `longest`: see op attn.varlen.
    """

    queries: slice
    slots: torch.Tensor
    q_start: torch.Tensor
    k_start: torch.Tensor
    longest: tuple[int, int]


@dataclass(eq=False)
class LatentPrefill:
    """attn.mla.prefill that may leave a step to be expanded: `run` is the absorbed kernel's.

    Where `plan` decides so, `meta` has `segments` and the layer works through `pieces`. The host's part of a plan is
    kept until the next one; the step that was planned last is the one that runs.
    """

    kernel: AttentionKernel
    room: Room
    granule: int
    expands: bool
    longest: int = field(default=0, init=False)
    _cuts: list[_Cut] = field(default_factory=list, init=False)

    def workspace(self, limits: AttnLimits) -> None:
        """Note the largest step; the absorbed kernel's workspace."""
        self.room.take(limits.tokens)
        self.kernel.workspace(limits)

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """The absorbed kernel's plan and key, or the cuts of what is cached: such a step is never captured."""
        if not self._worth(rows):
            return self.kernel.plan(rows, into)
        tokens = int(rows.n_query.sum())
        self.longest = int(rows.n_query.max(initial=0))
        self._cuts, segments = cut(rows, self.room.piece(tokens))
        into.put("segments", segments)
        return ""

    def run(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor | None,
        kv: tuple[torch.Tensor, ...],
        meta: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Absorbed; see protocols.AttentionKernel."""
        return self.kernel.run(q, k_new, v_new, kv, meta, out, lse)

    def pieces(self, step: Step, meta: Mapping[str, torch.Tensor]) -> list[Piece]:
        """What is cached, in pieces, by the rows' true lengths; computed by the first layer of a step that asks."""
        return [self._piece(cut, (self, index), step, meta) for index, cut in enumerate(self._cuts)]

    def _piece(self, cut: _Cut, name: object, step: Step, meta: Mapping[str, torch.Tensor]) -> Piece:
        if (name, "slots") not in step.notes:
            starts = meta["q_start"][cut.first : cut.last + 1]
            step.notes[name, "q"] = starts - starts[:1]
            step.notes[name, "slots"], step.notes[name, "k"] = find_slots(meta, cut, self.granule)
        slots, q_start, k_start = (step.notes[name, what] for what in ("slots", "q", "k"))
        return Piece(cut.queries, slots, q_start, k_start, cut.longest)

    def _worth(self, rows: AttnRows) -> bool:
        if not self.expands:
            return False
        most = self.room.absorbed
        if most is not None and int(rows.n_query.sum()) > most:
            return True
        absorbed, expanded = self.room.sizes.costs(rows.n_query, rows.kv_len)
        return expanded <= absorbed


def cut(rows: AttnRows, most: int) -> tuple[list[_Cut], Int32]:
    """The cached tokens of a step's rows in equal pieces of at most `most`, and for the device [2 S] int32.

    These are, of the S parts of a row that lie in one piece, the first token and the number of tokens.
    """
    prefix = (rows.kv_len - rows.n_query).astype(np.int64)
    ends = np.cumsum(prefix)
    starts, total = ends - prefix, int(prefix.sum())
    borders = np.concatenate(([0], np.cumsum(rows.n_query)))
    count = -(-total // most)
    cuts: list[_Cut] = []
    segments: list[np.ndarray[tuple[int, int], np.dtype[np.int64]]] = []
    done = 0
    for piece in range(count):
        begin, end = total * piece // count, total * (piece + 1) // count
        first, last = int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(starts, end, "left"))
        here = slice(first, last)
        low = np.maximum(begin - starts[here], 0)
        tokens = np.minimum(end - starts[here], prefix[here]) - low
        segments.append(np.stack((low, tokens)))
        longest = int(rows.n_query[here].max()), int(tokens.max())
        queries = slice(int(borders[first]), int(borders[last]))
        cuts.append(_Cut(first, last, end - begin, queries, slice(done, done + last - first), longest))
        done += last - first
    joined = np.concatenate(segments, 1) if segments else np.zeros((2, 0))
    return cuts, joined.astype(np.int32).reshape(-1)


def find_slots(meta: Mapping[str, torch.Tensor], cut: _Cut, granule: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots of a piece's tokens [tokens], borders of its rows in them [rows + 1]), both int32.

    Rows may be shorter than the host thought: their tokens then lie together at the start, and what follows are slots
    of the last row.
    """
    here = slice(cut.first, cut.last)
    low, most = meta["segments"].view(2, -1)[:, cut.segments].long()
    prefix = (meta["kv_len"][here] - meta["q_start"][cut.first : cut.last + 1].diff()).long()
    count = torch.minimum(prefix - low, most).clamp(min=0)
    ends = count.cumsum(0)
    place = torch.arange(cut.tokens, device=ends.device)
    row = torch.searchsorted(ends, place, right=True).clamp(max=len(ends) - 1)
    token = torch.minimum((low - ends + count)[row] + place, (prefix - 1).clamp(min=0)[row])
    granules = meta["table"][meta["request"][here].long()[row], token // granule]
    return granules * granule + (token % granule).int(), torch.cat((ends.new_zeros(1), ends)).int()
