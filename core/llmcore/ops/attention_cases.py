"""Cases to test and time attention kernels with, and the reference for them.

The long cases have real sizes, for compiled kernels on a device: contexts up to 128k, chunks over long prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from llmcore.api.models import AttnSpec
from llmcore.api.protocols import AttnRows
from llmcore.api.specs import OpContext
from llmcore.ops import DTYPES, Shape, draw, draws_on, size
from llmcore.ops.attention import attend, shape_of, spec_of, token_slots


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


def reference(case: AttnCase) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a case in f32, on its device, for a block of queries at a time to bound the memory of scores."""
    spec, granule = spec_of(case.context), case.context.granule
    out, lse = case.out().float(), case.q.new_empty(case.q.shape[:2]).float()
    first = 0
    for request, n, length in zip(case.meta["request"].tolist(), case.rows.n_query, case.rows.kv_len, strict=True):
        slots = token_slots(case.meta["table"][request], 0, int(length), granule)
        keys, values = case.kv[0][slots], case.kv[-1][slots, :, : spec.value_size]
        for start in range(0, int(n), _BLOCK):
            count = min(_BLOCK, int(n) - start)
            # `attend` takes its queries for the last tokens, so the keys must end with this block's tokens.
            end = int(length - n) + start + count if spec.mask == "causal" else int(length)
            rows = slice(first + start, first + start + count)
            out[rows], lse[rows] = attend(case.q[rows], keys[:end], values[:end], spec)
        first += int(n)
    return out, lse


_BLOCK = 64


SHAPES: tuple[Shape, ...] = tuple(
    shape_of(spec)
    for spec in (
        AttnSpec(heads=9, kv_heads=3, key_size=16, value_size=16, scale=0.25),
        AttnSpec(heads=5, kv_heads=1, key_size=8, value_size=8, scale=0.3),
        AttnSpec(heads=4, kv_heads=4, key_size=16, value_size=16, scale=0.25, window=5),
    )
)
"""Groups of odd sizes, one KV head, a window."""


def with_spec(context: OpContext) -> OpContext:
    """`context`, with a small and odd AttnSpec if it has no shape."""
    if context.shape:
        return context
    spec = AttnSpec(heads=9, kv_heads=3, key_size=16, value_size=16, scale=0.25)
    return replace(context, layout=context.layout or "token", shape=shape_of(spec))


_TIMED_KV = (512, 8192)
"""KV lengths per row in timed cases. The longer one is used only for few rows."""


def decode_timed(context: OpContext, tokens: int) -> Iterator[tuple[AttnCase]]:
    """Rows of one query token, all with the same KV length."""
    for kv_len in _TIMED_KV[: 2 if tokens <= 16 else 1]:
        yield (case(with_spec(context), [1] * tokens, [kv_len] * tokens),)


def prefill_timed(context: OpContext, tokens: int) -> Iterator[tuple[AttnCase]]:
    """One whole prompt, and a chunk of the same length over a prefix."""
    for prefix in (0, _TIMED_KV[0]):
        yield (case(with_spec(context), [tokens], [prefix + tokens]),)


def mixed_timed(context: OpContext, tokens: int) -> Iterator[tuple[AttnCase]]:
    """Half of the tokens are decode rows, the others are one chunk of a prompt."""
    decode, kv_len = tokens // 2, _TIMED_KV[0]
    chunk = tokens - decode
    yield (case(with_spec(context), [1] * decode + [chunk], [kv_len] * decode + [kv_len + chunk]),)


def decode_cases(context: OpContext) -> Iterator[AttnCase]:
    """Rows of one query token: KV of one token, around a granule, and long rows beside short ones."""
    for lengths in ((1,), (37,), (1, 16, 17, 200), tuple(range(3, 18))):
        yield case(context, [1] * len(lengths), lengths)


def prefill_cases(context: OpContext) -> Iterator[AttnCase]:
    """Whole prompts, chunks over a prefix, single tokens, and all of these in one step."""
    for n_query, kv_len in (((5,), (5,)), ((7,), (40,)), ((1,), (9,)), ((1, 4, 33, 2), (1, 50, 33, 130))):
        yield case(context, n_query, kv_len)


def mixed_cases(context: OpContext) -> Iterator[AttnCase]:
    """Decode rows, chunks and padding rows in one step."""
    for n_query, kv_len in (
        ((1,), (33,)),
        ((1, 1, 5, 0), (70, 3, 5, 0)),
        ((1, 1, 4, 33, 0, 0), (1, 50, 90, 33, 0, 0)),
    ):
        yield case(context, n_query, kv_len)


Rows = tuple[Sequence[int], Sequence[int]]
"""(n_query, kv_len) of a case."""

SHARP = 4.0
"""The standard deviation of the scores: with it, a few of 128k keys decide the result."""

MOST_BYTES = 1200 * 2**20
"""Most bytes of a case's KV in f32. Larger cases are left out, so that several processes can run at the same time."""


def long_decode_cases(context: OpContext) -> Iterator[AttnCase]:
    """Rows of one query token: one row and many, KV of 4k, 32k and 128k tokens, long rows beside short ones."""
    skewed = (1, 17, 500, 4096, 33, 9001, 2, 64)
    wide = tuple(int(n) for n in np.random.default_rng(len(context.dtype)).integers(1, 700, 300))
    lengths: dict[int, tuple[Sequence[int], ...]] = {
        0: ((4097,), (32768,), (131072,)),
        1: (skewed, (8192,) * 3, (1, 32769)),
        2: ((*skewed, *range(100, 1700, 100)),),
        3: (wide[:100], (2000,) * 66),
        4: (wide,),
    }
    for kv_len in lengths[context.bucket]:
        yield from _made(context, [((1,) * len(kv_len), kv_len)])


def long_prefill_cases(context: OpContext) -> Iterator[AttnCase]:
    """Whole prompts, and chunks over prefixes of 4k and 32k tokens, short rows beside long ones."""
    rows: dict[int, tuple[Rows, ...]] = {
        0: (((1,), (32769,)),),
        1: (((3, 13), (4099, 700)),),
        2: (((60,), (32768,)), ((1, 40, 20), (129, 40, 5000))),
        3: (((100, 28, 128), (8192, 28, 2000)),),
        4: (((512,), (32768,)), ((4096,), (4096,)), ((1000, 31, 700, 1), (1000, 4127, 1500, 9000))),
    }
    yield from _made(context, rows[context.bucket])


def long_mixed_cases(context: OpContext) -> Iterator[AttnCase]:
    """Decode rows beside chunks and padding rows."""
    few = (1, 17, 500, 4096, 33, 9001)
    many = tuple(range(40, 4040, 40))
    rows: dict[int, tuple[Rows, ...]] = {
        0: (((1,), (32769,)),),
        1: (((1,) * 6 + (10, 0), (*few, 4106, 0)),),
        2: (((1,) * 6 + (40, 0, 0), (*few, 5000, 0, 0)),),
        3: (((1,) * 100 + (150, 6, 0), (*many, 1500, 6, 0)),),
        4: (((1,) * 100 + (300, 112, 0, 0), (*many, 4096, 112, 0, 0)), ((512,), (512,))),
    }
    yield from _made(context, rows[context.bucket])


def _made(context: OpContext, rows: Sequence[Rows]) -> Iterator[AttnCase]:
    context = with_spec(context)
    width = size(context.shape, "kv_heads") * (size(context.shape, "key_size") + size(context.shape, "value_size"))
    for n_query, kv_len in rows:
        if 4 * width * sum(kv_len) <= MOST_BYTES:
            yield case(context, n_query, kv_len, sharpness=SHARP)


def projected(made: AttnCase) -> AttnCase:
    """The case with queries, keys and values as parts of the rows of one tensor, as a projection returns them."""
    assert made.v_new is not None, "a case over a joined layout has no values of its own"
    parts = (made.q, made.k_new, made.v_new)
    row = torch.cat([part.flatten(1) for part in parts], 1)
    views, start = [], 0
    for part in parts:
        width = part.shape[1] * part.shape[2]
        views.append(row[:, start : start + width].view(part.shape))
        start += width
    return replace(made, q=views[0], k_new=views[1], v_new=views[2])
