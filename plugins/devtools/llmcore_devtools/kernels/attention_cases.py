"""Cases to check and time attention kernels with: queries and KV for the rows that an op's samples name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from llmcore.api.protocols import AttnRows
from llmcore.api.specs import OpContext
from llmcore.ops import DTYPES, draw, draws_on, size
from llmcore.ops.attention import ReferenceAttention, spec_of, token_slots


@dataclass
class AttnCase:
    """One call of an attention kernel: the arguments of `run`, and the rows for `plan`."""

    context: OpContext
    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor | None
    kv: tuple[torch.Tensor, ...]
    meta: dict[str, torch.Tensor]
    rows: AttnRows

    def out(self) -> torch.Tensor:
        """A fresh output, full of NaN."""
        return self.q.new_full((*self.q.shape[:2], size(self.context.shape, "value_size")), torch.nan)

    def joined(self) -> AttnCase:
        """The case over a layout that is `joined`: a token's value is the first part of its key."""
        return replace(self, v_new=None, kv=self.kv[:1])

    def projected(self) -> AttnCase:
        """The case with queries, keys and values as parts of the rows of one tensor, as a projection returns them."""
        assert self.v_new is not None, "a case over a joined layout has no values of its own"
        parts = (self.q, self.k_new, self.v_new)
        row = torch.cat([part.flatten(1) for part in parts], 1)
        views, start = [], 0
        for part in parts:
            width = part.shape[1] * part.shape[2]
            views.append(row[:, start : start + width].view(part.shape))
            start += width
        return replace(self, q=views[0], k_new=views[1], v_new=views[2])

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the torch reference, in f32."""
        reference = ReferenceAttention(replace(self.context, layout="token"))
        out, lse = self.out().float(), self.q.new_empty(self.q.shape[:2]).float()
        return reference.run(self.q, self.k_new, self.v_new, self.kv, self.meta, out, lse), lse


class Uploads:
    """A MetaWriter that puts the arrays of `plan` straight into the `meta` of `run`."""

    def __init__(self, meta: dict[str, torch.Tensor]) -> None:
        self.meta = meta

    def put(self, name: str, values: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Store `values` as a tensor on the device of the table."""
        self.meta[name] = torch.from_numpy(values).to(self.meta["table"].device)


def case(
    context: OpContext, n_query: Sequence[int], kv_len: Sequence[int], seed: int = 0, sharpness: float = 1.0
) -> AttnCase:
    """A case with rows of these lengths over scattered granules of the context's layout, on the device of `draw`.

    Slots that no row holds and the rest of each row's last granule are NaN. Table entries past a row's end point to
    such a granule. `sharpness` scales every second query, so that few keys of a long context decide its result.
    """
    where = draws_on()
    spec, granule, dtype = spec_of(context), context.granule, DTYPES[context.dtype]
    random = np.random.default_rng(seed)
    needed = [-(-length // granule) for length in kv_len]
    granules = random.permutation(np.arange(1, sum(needed) + 3))
    table = np.full((len(kv_len) + 2, max(needed) + 1), granules[-1], dtype=np.int32)
    request = random.permutation(len(kv_len) + 2)[: len(kv_len)].astype(np.int32)
    slots = (len(granules) + 1) * granule
    keys = torch.full((slots, spec.kv_heads, spec.key_size), torch.nan, dtype=dtype, device=where)
    values = torch.full((slots, spec.kv_heads, spec.value_size), torch.nan, dtype=dtype, device=where)
    taken = 0
    new: list[torch.Tensor] = []
    for row, (n, length) in enumerate(zip(n_query, kv_len, strict=True)):
        table[request[row], : needed[row]] = granules[taken : taken + needed[row]]
        taken += needed[row]
        own = token_slots(torch.from_numpy(table[request[row]]), 0, length, granule).to(where)
        keys[own] = draw(context, length, spec.kv_heads, spec.key_size, seed=seed + 2 * row + 1)
        values[own] = draw(context, length, spec.kv_heads, spec.value_size, seed=seed + 2 * row + 2)
        new.append(own[length - n :])
    borders = np.cumsum([0, *n_query], dtype=np.int32)
    meta = {
        "table": torch.from_numpy(table).to(where),
        "request": torch.from_numpy(request).to(where),
        "q_start": torch.from_numpy(borders).to(where),
        "kv_len": torch.tensor(kv_len, dtype=torch.int32, device=where),
    }
    rows = AttnRows(n_query=np.asarray(n_query, np.int32), kv_len=np.asarray(kv_len, np.int32))
    q = draw(context, int(borders[-1]), spec.heads, spec.key_size, seed=seed)
    q[1::2] *= sharpness
    own = torch.cat(new)
    return AttnCase(context, q, keys[own], values[own], (keys, values), meta, rows)


SHARP = 4.0
"""The standard deviation of a long case's scores: with it, a few of 128k keys decide the result."""

MOST_BYTES = 1200 * 2**20
"""Most bytes of a case's KV in f32. Larger cases are left out, so that several processes can run at the same time."""


def cases_of(
    module: Any, context: OpContext, samples: Iterable[tuple[Any, ...]], long: bool = False
) -> Iterator[tuple[Any, ...]]:
    """Samples of the op of `module`. Those of attention are rows, and become cases. `long`: as in a real model."""
    spec, joined = context.shape, getattr(module, "JOINED", False)
    for sample in samples:
        if not isinstance(sample[0], AttnRows):
            yield sample
            continue
        n_query, kv_len = sample[0].n_query.tolist(), sample[0].kv_len.tolist()
        width = size(spec, "kv_heads") * (size(spec, "key_size") + size(spec, "value_size"))
        if long and 4 * sum(kv_len) * width > MOST_BYTES:
            continue
        made = case(context, n_query, kv_len, sharpness=SHARP if long else 1.0)
        yield (made.joined() if joined else made.projected() if long else made,)
