"""Prefill of latent attention: the choice between the absorbed and the expanded form, and the pieces of a prefix.

In the absorbed form, queries attend to the latent rows themselves, which are wide. In the expanded form, the rows of
all visible tokens first become keys and values of every head, which are narrow. The expanded form is cheaper from a
few hundred queries per row on. arXiv:2405.04434, section 2.1, has both forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from llmcore.api import AttentionKernel, AttnLimits, AttnRows, MetaWriter
from llmcore.layers import Step
from numpy.typing import NDArray

PREFIX_TOKENS = 8192
"""Most cached tokens, over all rows, that are expanded at a time."""


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of latent attention on this rank, in elements."""

    heads: int
    """Number of heads."""
    plain: int
    """Size of the part of a head's key without rope."""
    rotated: int
    """Size of the part of a head's key with rope."""
    value: int
    """Size of a head's value."""
    latent: int
    """Size of a token's latent."""

    def costs(self, rows: AttnRows) -> tuple[int, int]:
        """Multiplications per head for a step's prefill rows (absorbed, expanded); causal scores count half."""
        new, prefix = rows.n_query.astype(np.int64), rows.kv_len.astype(np.int64) - rows.n_query
        scores = int((new * prefix + new * new // 2).sum())
        up = self.latent * (self.plain + self.value)
        absorbed = int(new.sum()) * up + scores * (2 * self.latent + self.rotated)
        expanded = int(new.sum() + prefix.sum()) * up + scores * (self.plain + self.rotated + self.value)
        return absorbed, expanded


@dataclass
class Room:
    """The memory limit of a step, shared by a group's kernels: the need of the largest prompt, expanded as a whole.

    `tokens`: tokens of the largest step; None before `take`. The engine runs such a step once at the start and
    measures it. Pieces of a cached prefix and absorbed queries must not need more memory than that step.
    """

    sizes: LatentSizes
    tokens: int | None = None

    def take(self, tokens: int) -> None:
        """Note the tokens of the largest step of one kernel."""
        self.tokens = max(tokens, self.tokens or 0)

    @property
    def most(self) -> int:
        """Elements per head in memory at once in the largest step: queries, keys and values, and copies of them."""
        n = self.sizes
        return (self.tokens or 0) * (3 * n.plain + 2 * n.rotated + 2 * n.value)

    def piece(self, tokens: int) -> int:
        """Most cached tokens to expand at a time in a step of `tokens` new tokens."""
        if self.tokens is None:
            return PREFIX_TOKENS
        n = self.sizes
        left = self.most - tokens * (n.plain + n.rotated + 2 * n.value)
        each = 2 * n.plain + n.rotated + n.value + -(-2 * (n.latent + n.rotated) // n.heads)
        return max(min(PREFIX_TOKENS, left // each), 1)

    @property
    def absorbed(self) -> int | None:
        """Most tokens of a step in the absorbed form; None if the largest step is not known."""
        n = self.sizes
        return None if self.tokens is None else self.most // (n.plain + 2 * n.rotated + 2 * n.latent)


@dataclass(frozen=True)
class _Cut:
    """A piece of the cached tokens of consecutive rows, as the host plans it."""

    first: int
    """The first row."""
    last: int
    """The row after the last one."""
    tokens: int
    """Number of cached tokens in the piece, an upper bound."""
    queries: slice
    """The new tokens of these rows in the step."""
    segments: slice
    """The entries of these rows in the second result of `cut`."""
    longest: tuple[int, int]
    """(most queries, most keys) of a row."""


@dataclass(frozen=True)
class Piece:
    """Cached tokens of R rows that are expanded together, and the queries that see them."""

    queries: slice
    """The new tokens of these rows in the step."""
    slots: torch.Tensor
    """[L] int32, the slots of the cached tokens. Slots past the last border belong to no row."""
    q_start: torch.Tensor
    """[R + 1] int32, the borders of the rows in `queries`."""
    k_start: torch.Tensor
    """[R + 1] int32, the borders of the rows in `slots`."""
    longest: tuple[int, int]
    """See op attn.varlen."""


@dataclass(eq=False)
class LatentPrefill:
    """The kernel of attn.mla.prefill, which can leave a step to the expanded form. `run` is the absorbed kernel.

    If `plan` chooses the expanded form, `meta` has `segments`, and the layer computes `pieces` instead of `run`. The
    object keeps the host's part of a plan until the next plan, so the step that was planned last must run next.
    """

    kernel: AttentionKernel
    room: Room
    granule: int
    expands: bool
    longest: int = field(default=0, init=False)
    _cuts: list[_Cut] = field(default_factory=list, init=False)

    def workspace(self, limits: AttnLimits) -> None:
        """Note the largest step, and take the absorbed kernel's workspace."""
        self.room.take(limits.tokens)
        self.kernel.workspace(limits)

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """Plan the absorbed kernel and return its graph key, or cut the cached prefix and return "".

        A step in the expanded form is never captured.
        """
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
        """Compute the absorbed form; see protocols.AttentionKernel."""
        return self.kernel.run(q, k_new, v_new, kv, meta, out, lse)

    def pieces(self, step: Step, meta: Mapping[str, torch.Tensor]) -> list[Piece]:
        """The cached tokens in pieces, by the rows' true lengths. The first layer of a step computes the slots."""
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
        absorbed, expanded = self.room.sizes.costs(rows)
        return expanded <= absorbed


def cut(rows: AttnRows, most: int) -> tuple[list[_Cut], NDArray[np.int32]]:
    """Cut the cached tokens of a step's rows into equal pieces of at most `most` tokens; returns them and segments.

    A segment is the part of a row that lies in one piece. The segments [2 S] int32 for the device are the first tokens
    of S segments, then their numbers of tokens.
    """
    prefix = (rows.kv_len - rows.n_query).astype(np.int64)
    ends = np.cumsum(prefix)
    starts, total = ends - prefix, int(prefix.sum())
    borders = np.concatenate(([0], np.cumsum(rows.n_query)))
    count = -(-total // most)
    cuts: list[_Cut] = []
    segments: list[NDArray[np.int64]] = []
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

    Rows may be shorter than the host assumed. Then the valid slots are at the start, and the rest repeats slots of the
    last row.
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
