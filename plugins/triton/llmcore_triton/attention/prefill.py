"""attn.gqa.prefill: FlashAttention over rows of any number of query tokens. It reads a cached prefix from its slots.

It reads the step's own keys and values where the projection left them, by the tensor memory accelerator (TMA) if the
GPU has one. The host cuts queries into tiles, since it knows the number of new tokens of each row. The device reads
the rows' lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from llmcore.api import AttnLimits, AttnRows, AttnSpec, MetaWriter, OpContext
from llmcore.layers import spec_of

from llmcore_triton import launch, tuned
from llmcore_triton.attention.prefill_kernel import flash
from llmcore_triton.attention.prefill_work import count_tiles, tiles_of
from llmcore_triton.entry import Box

KERNEL = "flash"

Config = Mapping[str, Any]
"""The keys of a launch configuration:
- `block_m`: queries of a tile, tokens times heads
- `block_n`: keys of a block
- `warps`, and `stages` of the pipeline
- `pack`: a tile holds all heads of a KV head, else one
- `tma`: new keys come by TMA
- `small`: steps too short to fill the device with tiles of `block_m` are cut into SMALL ones"""

SMALL: Config = {"block_m": 64, "block_n": 64, "warps": 4, "stages": 2}
FILLED = 2
"""A step with this many programs per multiprocessor is long enough for large tiles."""

ALIGNED = 16
"""Alignment in bytes that TMA requires of addresses and row strides."""


@dataclass(frozen=True)
class _Launch:
    """One way to run the kernel, with its fixed arguments. `kernels`: without lse and with it."""

    name: str
    tokens: int
    programs: int
    block_n: int
    kernels: tuple[launch.Bound, launch.Bound]


class Prefill:
    """An AttentionKernel for the token layout. `config` is its launch configuration."""

    def __init__(self, context: OpContext, config: Config) -> None:
        spec, self._granule = spec_of(context), context.granule
        self._spec, self._pdl = spec, launch.overlaps(context)
        self._processors = context.device.processors
        self._sizes = _padded(spec.key_size), _padded(spec.value_size)
        # TMA loads whole boxes, so it needs half types and heads without padding.
        self._tma = bool(config["tma"]) and context.dtype != "f32" and self._sizes == (spec.key_size, spec.value_size)
        shapes = [config, {**config, **SMALL}] if config["small"] else [config]
        self._launches = [self._launch(shape) for shape in shapes]

    def _launch(self, config: Config) -> _Launch:
        spec = self._spec
        group = spec.heads // spec.kv_heads
        pack = group if config["pack"] and group <= config["block_m"] // 2 else 1
        options = {
            "HEADS": spec.heads,
            "KV_HEADS": spec.kv_heads,
            "KEY": spec.key_size,
            "VALUE": spec.value_size,
            "PAD_K": self._sizes[0],
            "PAD_V": self._sizes[1],
            "GRANULE": self._granule,
            "PACK": pack,
            "CAP": spec.soft_cap,
            "CAUSAL": spec.mask == "causal",
            "WINDOW": spec.window,
            "BLOCK_M": config["block_m"],
            "BLOCK_N": config["block_n"],
            "STAGES": config["stages"],
            "PDL": self._pdl,
            "num_warps": config["warps"],
            "num_stages": config["stages"],
        }
        if self._pdl:
            options["launch_pdl"] = True
        tokens = config["block_m"] // pack
        kernel = launch.Bound(flash, **options)
        return _Launch(
            name=f"tiles{config['block_m']}",
            tokens=tokens,
            programs=spec.heads // pack,
            block_n=config["block_n"],
            kernels=(kernel.but(LSE=False), kernel.but(LSE=True)),
        )

    def workspace(self, limits: AttnLimits) -> None:
        """Reserves nothing."""

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """Cut the rows into tiles. Their number depends on the lengths, so no CUDA graph can hold this step."""
        chosen = self._launches[0]
        if len(self._launches) > 1:
            programs = count_tiles(rows.n_query, chosen.tokens) * chosen.programs
            if programs < FILLED * self._processors:
                chosen = self._launches[1]
        into.put(chosen.name, tiles_of(rows, chosen.tokens, self._spec.window))
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
        """See protocols.AttentionKernel. Rows of q, k_new and v_new may be strided. Their heads are contiguous."""
        assert v_new is not None, "attn.gqa.prefill needs values"
        shape = next(each for each in self._launches if each.name in meta)
        tiles, table = meta[shape.name], meta["table"]
        if not tiles.shape[0]:
            return out
        k_tiles, v_tiles = self._boxes(k_new, v_new, shape.block_n)
        shape.kernels[lse is not None](
            (tiles.shape[0] // 2 * shape.programs,),
            q,
            k_new,
            v_new,
            k_tiles,
            v_tiles,
            *kv,
            table,
            meta["request"],
            meta["q_start"],
            meta["kv_len"],
            tiles,
            out,
            lse,
            table.stride(0),
            q.stride(0),
            k_new.stride(0),
            v_new.stride(0),
            kv[0].stride(0),
            kv[1].stride(0),
            self._spec.scale,
        )
        return out

    def _boxes(self, k: torch.Tensor, v: torch.Tensor, block_n: int) -> tuple[Box, Box] | tuple[None, None]:
        """Returns TMA descriptors of k and v [T, KV heads, size], or None if TMA cannot read them."""
        k_stride, v_stride = k.stride(0), v.stride(0)
        bytes_apart = (k_stride | v_stride) * k.element_size()
        if not self._tma or (bytes_apart | k.data_ptr() | v.data_ptr()) % ALIGNED:
            return None, None
        tokens, heads, key = k.shape
        value = v.shape[2]
        return (
            Box(k, [tokens, heads * key], [k_stride, 1], [block_n, key]),
            Box(v, [tokens, heads * value], [v_stride, 1], [block_n, value]),
        )


def _padded(size: int) -> int:
    """Returns the size of a head in a block: a power of two that tensor cores take."""
    return max(16, int(triton.next_power_of_2(size)))


def default(context: OpContext) -> dict[str, Any]:
    """Returns a configuration that fits the device's shared memory and registers."""
    spec: AttnSpec = spec_of(context)
    wide = max(_padded(spec.key_size), _padded(spec.value_size)) > 128
    hopper = context.device.capability == launch.HOPPER
    both: dict[str, Any] = {"pack": True, "tma": hopper, "small": not wide and context.dtype != "f32"}
    if context.dtype == "f32":
        return {**both, "block_m": 32, "block_n": 32, "warps": 4, "stages": 1}
    if wide:
        return {**both, "block_m": 128 if hopper else 64, "block_n": 64 if hopper else 32, "warps": 8, "stages": 2}
    if hopper:
        return {**both, "small": False, "block_m": 64, "block_n": 64, "warps": 4, "stages": 3}
    return {**both, "block_m": 128, "block_n": 64, "warps": 8, "stages": 2}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing on Hopper, for heads of up to 128 elements."""
    base = default(context)
    yield base
    if context.dtype == "f32" or base["block_n"] != 64:
        return
    for block_m, block_n, warps, stages in ((128, 128, 8, 3), (128, 64, 8, 4), (128, 64, 4, 2), (64, 64, 4, 2)):
        yield {**base, "block_m": block_m, "block_n": block_n, "warps": warps, "stages": stages}
    yield {**base, "tma": False}
    yield {**base, "pack": False}


def make_with(context: OpContext, config: Config) -> Prefill:
    """The kernel in the configuration `config`."""
    return Prefill(context, config)


def make(context: OpContext) -> Prefill:
    """The kernel. `context.shape` is an AttnSpec."""
    return make_with(context, tuned.choose(KERNEL, context, default(context)))


def cost(context: OpContext) -> float | None:
    """Measured microseconds."""
    return tuned.microseconds(KERNEL, context)
