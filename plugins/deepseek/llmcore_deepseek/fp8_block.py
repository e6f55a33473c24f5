"""Weights of `fp8-block`: `X.weight` in float8 e4m3 times `X.weight_scale_inv`, one f32 per block of rows and columns.

The last blocks of a matrix may extend beyond its edges. A tensor whose file header does not give float8 is plain; the
config lists such modules in `modules_to_not_convert`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from llmcore.api import Checkpoint, ConfigError, ModelConfig
from llmcore.layers import DTYPES

SUFFIX = "_scale_inv"
FLOAT8 = "F8_E4M3"
"""The name that safetensors gives the type."""
NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
CHUNK = 1 << 22
"""Number of elements dequantized at a time, so that their f32 form stays small."""


def make(quantization: Mapping[str, Any], config: ModelConfig) -> FP8Blocks:
    """The QuantMethod for one checkpoint. Raises ConfigError for a config that fp8-block cannot read."""
    block = quantization["weight_block_size"]
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ConfigError(f"weight_block_size in quantization_config is {block!r}; fp8-block needs [rows, columns]")
    known = {"fmt": ("e4m3", "float8_e4m3fn"), "activation_scheme": ("dynamic",)}
    for name, values in known.items():
        if (value := quantization.get(name)) not in (None, *values):
            raise ConfigError(f"{name} in quantization_config is {value!r}; fp8-block reads {values[0]} only")
    return FP8Blocks((block[0], block[1]), config)


class FP8Blocks:
    """A protocols.QuantMethod that gives the model plain weights, so its linears stay as they are."""

    def __init__(self, block: tuple[int, int], config: ModelConfig) -> None:
        self.block, self.config = block, config

    def checkpoint(self, checkpoint: Checkpoint, device: torch.device) -> Checkpoint:
        """The checkpoint without scales, and with weights in the type in which the model computes."""
        return DequantizedCheckpoint(checkpoint, self.block, self.config)

    def method_for(self, modules: Sequence[str]) -> None:
        """None: every linear is plain."""


class DequantizedCheckpoint:
    """A protocols.Checkpoint that dequantizes the weights of another one."""

    def __init__(self, checkpoint: Checkpoint, block: tuple[int, int], config: ModelConfig) -> None:
        self._inner, self._block, self._dtype = checkpoint, block, DTYPES[config.dtype]
        stored = checkpoint.sizes()
        self._weights = {name for name, (_, dtype) in stored.items() if dtype == FLOAT8}
        self._check(stored)
        scales = {name + SUFFIX for name in self._weights}
        self._sizes = {
            name: (shape, NAMES[config.dtype] if name in self._weights else dtype)
            for name, (shape, dtype) in stored.items()
            if name not in scales
        }

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return self._inner.config()

    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json, or {} without that file."""
        return self._inner.generation_config()

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) by tensor name, without the scales."""
        return self._sizes

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Each tensor's name with a function that reads it. The function works until the caller asks for the next."""
        scales = self._scales()
        for name, read in self._inner.tensors():
            if name in self._weights:
                yield name, partial(self._weight, read, scales.pop(name))
            elif name in self._sizes:
                yield name, read

    def _scales(self) -> dict[str, torch.Tensor]:
        """All scales, by the name of their weight.

        They are read first, because a scale may lie behind its weight or in another file. In f32 with blocks of
        128 x 128 they take 1/4096 of the bytes of the weights.
        """
        found = {}
        for name, read in self._inner.tensors():
            if (weight := name.removesuffix(SUFFIX)) != name and weight in self._weights:
                found[weight] = read().to(torch.float32, copy=True)
        return found

    def _weight(self, read: Callable[[], torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        return dequantized(read(), scale, self._block, self._dtype)

    def _check(self, stored: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        if stored and not self._weights:
            raise ConfigError(
                "config.json says that weights are quantized with 'fp8', and no tensor is float8; remove its "
                "quantization_config if they were dequantized, else download the weights again"
            )
        for name in sorted(self._weights):
            shape = stored[name][0]
            if (found := stored.get(name + SUFFIX)) is None:
                raise ConfigError(f"{name} is float8 and has no {name + SUFFIX}; fp8-block needs a scale per block")
            wanted = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
            if len(shape) != 2 or found[0] != wanted:
                raise ConfigError(
                    f"{name + SUFFIX} is {list(found[0])}; {name} is {list(shape)}, which has {list(wanted)} blocks "
                    f"of {list(self._block)}"
                )


def dequantized(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """weight [rows, columns] float8 times scale [row blocks, column blocks] f32, computed in f32, as `dtype`."""
    (rows, columns), (high, wide) = weight.shape, block
    out = torch.empty(rows, columns, dtype=dtype)
    step = max(1, CHUNK // max(1, columns * high)) * high
    for first in range(0, rows, step):
        part = weight[first : first + step].float()
        factors = scale[first // high : -(-(first + len(part)) // high)]
        factors = factors.repeat_interleave(wide, 1)[:, :columns]
        out[first : first + step] = part.mul_(factors.repeat_interleave(high, 0)[: len(part)])
    return out
