"""The host part that the attention kernels share: they plan a list of items, run it, and merge the partial results.

All kernels of a model share one buffer per device for partial results, because they run one after another. A buffer in
use may be part of a captured CUDA graph, so it is never replaced. A kernel that then needs a larger one gets a new
buffer, which later kernels share. The old one lives as long as its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from llmcore.api import AttnLimits, AttnRows, AttnSpec, MetaWriter, OpContext
from llmcore.layers import spec_of
from triton import next_power_of_2

from llmcore_triton import launch
from llmcore_triton.attention.codes import by_element, half
from llmcore_triton.attention.merge import merge_row, merge_tile
from llmcore_triton.attention.stored import element_bytes, pools
from llmcore_triton.attention.work import Planner


class Scratch:
    """A buffer of f32 numbers that any kernel may overwrite."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.float32, device=device)
        self.used = False

    def __len__(self) -> int:
        return self._buffer.numel()

    def grow(self, numbers: int) -> None:
        """Make room for at least `numbers` numbers."""
        if numbers > len(self):
            self._buffer = torch.empty(numbers, dtype=torch.float32, device=self._buffer.device)

    def buffer(self) -> torch.Tensor:
        """Returns the buffer, which does not change from now on."""
        self.used = True
        return self._buffer


_CURRENT: WeakValueDictionary[torch.device, Scratch] = WeakValueDictionary()


def reserve(device: torch.device, numbers: int) -> Scratch:
    """Returns a Scratch of at least `numbers` numbers, shared if possible."""
    scratch = _CURRENT.get(device)
    if scratch is None or (scratch.used and numbers > len(scratch)):
        scratch = _CURRENT[device] = Scratch(device)
    scratch.grow(numbers)
    return scratch


Meta = Mapping[str, torch.Tensor]

_WHOLE, _SPLIT, _FIRSTS = "items", "split_items", "split_firsts"
"""Names of the uploads: the list, the list if some items have partial results to merge, and where these begin."""

BLOCKS = ((64, 4, 5), (32, 4, 5), (64, 4, 3), (64, 8, 5), (32, 4, 7), (128, 4, 3), (32, 2, 5), (128, 8, 5))
"""Values of `block_n`, `warps` and `stages` worth timing if KV is read once for a group. Likely ones come first."""

_SHARED = {True: 72 << 10, False: 48 << 10}
"""Bytes of shared memory for KV in flight, on Hopper (three programs per multiprocessor) and before."""

_MERGED = 128
"""Columns of partial results per program of a row's merge: one vector for each thread of a warp."""

_CHUNKS = ((64, 4), (32, 2), (8, 1))
"""Token bucket (the last also for larger ones) -> chunks of a row that its merge reads at once, and its warps. Few
rows have many chunks each and wait for memory. Many rows have few chunks each and need multiprocessors."""

_MOST_SHARED = 200 << 10
"""Bytes of shared memory that a program may take on Hopper at most. The compiler needs some of the rest."""


@dataclass(frozen=True)
class Config:
    """The launch configuration of an attention kernel."""

    block_n: int = 64
    """KV tokens of an inner step."""
    warps: int = 4
    stages: int = 5
    """Depth of the compiler's pipeline. Slots are read one level before their KV, so 2n + 1 keeps the KV of n inner
    steps in flight."""
    per_processor: int = 3
    """Programs per multiprocessor that the work is cut into."""
    least: int = 128
    """The least tokens of a chunk that are worth a program."""
    block_m: int = 16
    """Rows of a tile."""
    registers: int = 0
    """Most registers of a thread, so that more programs fit on a multiprocessor. 0: the compiler decides."""
    early: bool = False
    """A program of decode reads its first block of KV while the kernel ahead still runs, unless KV is in codes."""


def fitting(context: OpContext, config: Config) -> Config:
    """Reduces first `config`'s stages and then its block until they fit into shared memory."""
    room = _SHARED[(context.device.capability or 0) >= launch.HOPPER]
    while in_flight(context, config.block_n, config.stages) > room and config.block_n > 16:
        shallow = replace(config, stages=config.stages - 2)
        config = shallow if config.stages > 3 else replace(config, block_n=config.block_n // 2)
    return config


def usual(context: OpContext, **changed: Any) -> Config:
    """Returns the Config of a kernel with matrix products that has not been measured."""
    # exact f32 products do not use tensor cores, and their operands are in registers
    config = Config(block_n=16) if context.dtype == "f32" else Config(**changed)
    return fitting(context, config)


_WIDE = 128
"""Elements of the widest head that is not `wide`."""

_CODES: Mapping[str, Mapping[str, int]] = {
    "usual": {"block_n": 64, "warps": 2, "stages": 3, "per_processor": 8, "registers": 128},
    "many rows": {"block_n": 32, "warps": 1, "stages": 3, "per_processor": 16, "registers": 128},
    "by element": {"block_n": 128, "stages": 3, "per_processor": 4, "registers": 128},
    "wide": {"block_n": 64, "stages": 3, "registers": 168},
}
"""Changes of decode's Config over codes. If a head has one mark, many small programs hide what conversion takes. Over
int8 on an H200, 256 rows of 576 tokens took 78, 81 and 112 us with programs of 1, 2 and 4 warps, and 128 rows took 50,
42 and 58 (`scripts/kv_decode.py`). "by element" was measured too, "wide" was not."""

_FEW_TOKENS = 64
"""The least tokens of a chunk of a single row over codes, which are read in half the time."""


def wide(context: OpContext) -> bool:
    """True if heads are wider than usual, so that blocks of them take more registers."""
    spec = spec_of(context)
    return max(spec.key_size, spec.value_size) > _WIDE


def kind_of(context: OpContext) -> str:
    """Returns which launch configuration of products of f16 the context's heads need."""
    return "wide" if wide(context) else "by element" if by_element(context) else "usual"


def decoding(context: OpContext) -> Config:
    """Returns the Config of a kernel for one query token per row that has not been measured."""
    if not half(context):
        return usual(context)
    kind = kind_of(context)
    if kind == "usual" and context.bucket > 3:
        kind = "many rows"
    least = {"least": _FEW_TOKENS} if context.bucket == 0 else {}
    return usual(context, **_CODES[kind], **least)


def timed_over_codes(context: OpContext) -> Iterator[Config]:
    """Yields Configs of decode over codes that are worth timing."""
    for changes in _CODES.values() if half(context) else ():
        yield usual(context, **changes)
        yield usual(context, **{**changes, "registers": 0})


def timed(context: OpContext, blocks: Iterable[tuple[int, int, int]]) -> Iterator[Config]:
    """Yields Configs of these (block_n, warps, stages) that fit into a Hopper's shared memory."""
    for block_n, warps, stages in blocks:
        if in_flight(context, block_n, stages) <= _MOST_SHARED:
            yield Config(block_n=block_n, warps=warps, stages=stages)


def in_flight(context: OpContext, block_n: int, stages: int) -> int:
    """Returns the bytes of a program's KV in shared memory."""
    return max((stages - 1) // 2, 1) * block_n * token_bytes(context)


def token_bytes(context: OpContext) -> int:
    """Returns the bytes of one token's key and value of one KV head, padded as in a tile."""
    spec = spec_of(context)
    padded: int = next_power_of_2(spec.key_size) + next_power_of_2(spec.value_size)
    return padded * element_bytes(context)


class Listed:
    """An AttentionKernel over keys and values of heads. Its programs take items from a list.

    `tokens`: query tokens of a tile, None if every row has one. `programs`: programs per item; adjacent ones read the
    same KV. `fixed`: tokens of a chunk if results must not depend on how the work is cut, else None. A subclass makes
    `_kernel`, whose grid is (programs, items), with `options` of `config`.
    """

    _kernel: launch.Bound

    def __init__(
        self, context: OpContext, config: Config, *, programs: int, tokens: int | None = None, fixed: int | None = None
    ) -> None:
        spec = spec_of(context)
        self.spec, self.config, self.fixed, self._programs = spec, config, fixed, programs
        self.device = launch.place(context)
        wanted = max(context.device.processors, 1) * config.per_processor
        self.planner = Planner(
            items=max(wanted // programs, 1),
            block=config.block_n,
            least=config.least,
            tokens=tokens,
            window=spec.window,
            fixed=fixed,
        )
        self._pdl = launch.overlaps(context)
        options: dict[str, Any] = {"PDL": self._pdl, "launch_pdl": self._pdl}
        self.options = {
            "BLOCK_N": config.block_n,
            "STAGES": config.stages,
            "num_warps": config.warps,
            "num_stages": config.stages,
            **({"maxnreg": config.registers} if config.registers else {}),
            **options,
        }
        self._scratch: Scratch | None = None
        width = max(next_power_of_2(spec.value_size), 16)
        merging = {
            "HEADS": spec.heads,
            "V_SIZE": spec.value_size,
            "WINDOW": spec.window or 0,
            "ALIGN": fixed or config.block_n,
            **options,
        }
        if tokens is None:
            block = min(width, _MERGED)
            chunks, warps = _CHUNKS[min(context.bucket, len(_CHUNKS) - 1)]
            merging |= {"BLOCK_V": block, "BLOCK_C": chunks, "num_warps": warps}
            self._blocks = -(-spec.value_size // block)
        else:
            merging |= {"BLOCK_V": width, "TOKENS": tokens, "AHEAD": 4, "num_warps": 4}
        self._merge = launch.Bound(merge_row if tokens is None else merge_tile, **merging)

    def read(self, q: torch.Tensor, kv: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Returns the kernel's first arguments: what it reads, and how far apart the rows are."""
        return q, *pools(kv), q.stride(0), kv[0].stride(0), kv[1].stride(0)

    def known(self, rows: int) -> dict[str, Any]:
        """Returns what the kernel is compiled for in a step of `rows` rows."""
        return {}

    def workspace(self, limits: AttnLimits) -> None:
        """Reserve memory for partial results, shared with the model's other kernels."""
        room = self.planner.reserve(limits)
        self._scratch = reserve(self.device, room * self.spec.heads * (self.spec.value_size + 1))

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """See protocols.AttentionKernel. The key is the list's size, with a + if partial results must be merged."""
        work = self.planner.plan(rows)
        if work is None:
            return "1"
        into.put(_SPLIT if work.split else _WHOLE, work.items)
        if work.split and self.planner.tokens is None:
            into.put(_FIRSTS, work.firsts)
        return f"{work.size}+" if work.split else f"{work.size}"

    def run(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor | None,
        kv: tuple[torch.Tensor, ...],
        meta: Meta,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See protocols.AttentionKernel."""
        if self._scratch is None:
            raise RuntimeError("run before workspace")
        partial, room = self._scratch.buffer(), self.planner.room
        split = meta.get(_SPLIT)
        items = meta.get(_WHOLE) if split is None else split
        table, kv_len, q_start = meta["table"], meta["kv_len"], meta["q_start"]
        summed = partial if lse is None else lse
        grid = (self._programs, kv_len.shape[0] if items is None else items.shape[0] // 4 - 1)
        self._kernel.but(LISTED=items is not None, LSE=lse is not None, **self.known(len(kv_len)))(
            grid, *self.read(q, kv), out, summed, table, meta["request"], q_start, kv_len,
            kv_len if items is None else items, partial, room, table.stride(0), out.stride(0),
        )  # fmt: skip
        if split is not None:
            merge, heads = self._merge.but(LSE=lse is not None), self.spec.heads
            rest = (q_start, kv_len, out, summed, room, out.stride(0))
            if self.planner.tokens is None:
                merge((self._blocks, heads, kv_len.shape[0]), partial, split, meta[_FIRSTS], *rest)
            else:
                merge((heads, split.shape[0] // 4 - 1), partial, split, *rest)
        return out


def sizes(spec: AttnSpec, granule: int) -> dict[str, Any]:
    """Returns the sizes that a kernel is compiled for, except its tiles."""
    return {
        "K_SIZE": spec.key_size,
        "V_SIZE": spec.value_size,
        "SCALE": spec.scale,
        "SOFT_CAP": spec.soft_cap or 0.0,
        "WINDOW": spec.window or 0,
        "GRANULE": granule,
        "BLOCK_K": max(next_power_of_2(spec.key_size), 16),
        "BLOCK_V": max(next_power_of_2(spec.value_size), 16),
    }
