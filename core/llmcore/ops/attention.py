"""What the attention ops share: their meaning in torch, a kernel made of it, and cases to test kernels with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from llmcore.errors import ConfigError
from llmcore.models import AttnSpec
from llmcore.ops import DTYPES, Shape, draw, draws_on, size
from llmcore.protocols import AttnLimits, AttnRows, MetaWriter
from llmcore.specs import OpContext

TOLERANCE = {"f32": 2e-5, "f16": 5e-3, "bf16": 2e-2}


def shape_of(spec: AttnSpec) -> dict[str, Any]:
    """An AttnSpec as the shape of an OpContext."""
    return asdict(spec)


def spec_of(context: OpContext) -> AttnSpec:
    """The AttnSpec in an OpContext."""
    return AttnSpec(**context.shape)  # type: ignore[arg-type]


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttnSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, heads, key_size] are the last n of the tokens in keys [L, kv_heads, key_size] and values.

    Returns out [n, heads, value_size] and the log-sum-exp of the scaled scores [n, heads], both f32.
    """
    n, length, group = q.shape[0], keys.shape[0], spec.heads // spec.kv_heads
    grouped = q.float().view(n, spec.kv_heads, group, spec.key_size)
    scores = torch.einsum("nkgd,lkd->nkgl", grouped, keys.float()) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    seen = visible(n, length, spec).to(q.device)
    scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("nkgl,lkd->nkgd", (scores - lse.unsqueeze(-1)).exp(), values.float())
    return out.reshape(n, spec.heads, spec.value_size), lse.reshape(n, spec.heads)


def visible(n: int, length: int, spec: AttnSpec) -> torch.Tensor:
    """[n, length] bool: which tokens each of the last n sees."""
    key = torch.arange(length)
    query = torch.arange(length - n, length)[:, None]
    seen = key <= query if spec.mask == "causal" else torch.ones(n, length, dtype=torch.bool)
    if spec.window is not None:
        seen = seen & (key > query - spec.window)
    return seen


def token_slots(table: torch.Tensor, first: int, last: int, granule: int) -> torch.Tensor:
    """[last - first] int64: the slots of tokens first to last (exclusive) of one row of a table of granules."""
    tokens = torch.arange(first, last, device=table.device)
    if granule == 1:
        return table[first:last].long()
    return table[tokens // granule].long() * granule + tokens % granule


GQA_LAYOUTS = ("token",)
"""Keys and values of every head, side by side."""

LAYOUTS = (*GQA_LAYOUTS, "mla-latent")
"""What the torch reference reads. In `mla-latent` a token is one row, whose first `value_size` elements are its
value."""


class ReferenceAttention:
    """An AttentionKernel for the plain layouts, right for rows of any length. Reads KV only through the table."""

    def __init__(self, context: OpContext) -> None:
        self.spec = spec_of(context)
        self.granule = context.granule
        if context.layout not in LAYOUTS:
            known = " and ".join(LAYOUTS)
            raise ConfigError(
                f"{context.op}: the torch reference reads layouts {known}, not {context.layout!r}; a plugin's layout "
                f"comes with kernels of its own (docs/authors/kv-layout.md)"
            )
        if self.spec.sinks or self.spec.mask not in ("causal", "full"):
            raise ConfigError(f"{context.op}: the torch reference has no sinks and no {self.spec.mask!r} mask")

    def workspace(self, limits: AttnLimits) -> None:
        """Nothing to take."""

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """Nothing to upload; one key for all."""
        return "any"

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
        """One row after the other; see protocols.AttentionKernel."""
        borders = meta["q_start"].tolist()
        for row, (request, length) in enumerate(zip(meta["request"].tolist(), meta["kv_len"].tolist(), strict=True)):
            first, last = borders[row], borders[row + 1]
            if first == last:
                continue
            slots = token_slots(meta["table"][request], 0, length, self.granule)
            keys, values = kv[0][slots], kv[-1][slots, :, : self.spec.value_size]
            part, part_lse = attend(q[first:last], keys, values, self.spec)
            out[first:last] = part.to(out.dtype)
            if lse is not None:
                lse[first:last] = part_lse
        return out


# --- cases to test kernels with --------------------------------------------------------------------------------


@dataclass
class AttnCase:
    """One call of an attention kernel: `run`'s arguments, and the rows for `plan`."""

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


class Uploads:
    """A MetaWriter that hands what `plan` writes straight to `run`."""

    def __init__(self, meta: dict[str, torch.Tensor]) -> None:
        self.meta = meta

    def put(self, name: str, values: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Keep it as a tensor."""
        self.meta[name] = torch.from_numpy(values).to(self.meta["table"].device)


def case(
    context: OpContext, n_query: Sequence[int], kv_len: Sequence[int], seed: int = 0, sharpness: float = 1.0
) -> AttnCase:
    """Rows of these lengths over scattered granules of the context's layout, where `draw` draws.

    Slots that no row holds, and the rest of each row's last granule, are NaN; table entries past a row's end point
    at them. `sharpness` stretches every other query: over long contexts few keys then decide, instead of an average.
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
    if context.layout == "mla-latent":
        return AttnCase(context, q, keys[own], None, (keys,), meta, rows)
    return AttnCase(context, q, keys[own], values[own], (keys, values), meta, rows)


def reference(case: AttnCase) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a case, f32, computed where its tensors are: a block of queries at a time, to bound the scores."""
    spec, granule = spec_of(case.context), case.context.granule
    out, lse = case.out().float(), case.q.new_empty(case.q.shape[:2]).float()
    first = 0
    for request, n, length in zip(case.meta["request"].tolist(), case.rows.n_query, case.rows.kv_len, strict=True):
        slots = token_slots(case.meta["table"][request], 0, int(length), granule)
        keys, values = case.kv[0][slots], case.kv[-1][slots, :, : spec.value_size]
        for start in range(0, int(n), _BLOCK):
            count = min(_BLOCK, int(n) - start)
            # `attend` takes the last tokens for the queries, so the keys end with this block's.
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
"""Odd groups, one head, a window."""


def with_spec(context: OpContext) -> OpContext:
    """`context` with a small odd AttnSpec where it has none."""
    if context.shape:
        return context
    spec = AttnSpec(heads=9, kv_heads=3, key_size=16, value_size=16, scale=0.25)
    return replace(context, layout=context.layout or "token", shape=shape_of(spec))


def cost(shape: Shape) -> tuple[float, float]:
    """KV of `kv_len` tokens is read once for `tokens` queries."""
    kv_len, tokens, element = size(shape, "kv_len"), size(shape, "tokens"), size(shape, "element", 2)
    width = size(shape, "key_size") + size(shape, "value_size")
    moved = kv_len * size(shape, "kv_heads") * width + tokens * size(shape, "heads") * width
    return float(moved * element), 2.0 * tokens * kv_len * size(shape, "heads") * width


_TIMED_KV = (512, 8192)
"""Tokens of KV per row in what is timed; the longer only where few rows read it."""


def decode_timed(context: OpContext, tokens: int) -> Iterator[tuple[AttnCase]]:
    """Rows of one token, all as long."""
    for kv_len in _TIMED_KV[: 2 if tokens <= 16 else 1]:
        yield (case(with_spec(context), [1] * tokens, [kv_len] * tokens),)


def prefill_timed(context: OpContext, tokens: int) -> Iterator[tuple[AttnCase]]:
    """One whole prompt, and as long a chunk over a prefix."""
    for prefix in (0, _TIMED_KV[0]):
        yield (case(with_spec(context), [tokens], [prefix + tokens]),)


def mixed_timed(context: OpContext, tokens: int) -> Iterator[tuple[AttnCase]]:
    """Half of the tokens decode, the others are a chunk of a prompt."""
    decode, kv_len = tokens // 2, _TIMED_KV[0]
    chunk = tokens - decode
    yield (case(with_spec(context), [1] * decode + [chunk], [kv_len] * decode + [kv_len + chunk]),)


def decode_cases(context: OpContext) -> Iterator[AttnCase]:
    """Rows of one query token: lengths 1, around a granule, and long beside short."""
    for lengths in ((1,), (37,), (1, 16, 17, 200), tuple(range(3, 18))):
        yield case(context, [1] * len(lengths), lengths)


def prefill_cases(context: OpContext) -> Iterator[AttnCase]:
    """Whole prompts, chunks over a prefix, single tokens, and all of them together."""
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
