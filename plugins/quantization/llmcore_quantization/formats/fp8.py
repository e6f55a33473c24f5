"""FP8: weights in float8 e4m3 with a scale per block (DeepSeek-V3, Qwen3-FP8) or per tensor (AutoFP8, ModelOpt).

`weight` [outputs, inputs] times `weight_scale_inv` or `weight_scale`: f32, bf16 or e8m0, per block of
`weight_block_size`, per output or per tensor. Both names mean the scale itself. The last blocks may extend beyond the
weight. With `activation_scheme` static, `input_scale` (transformers: `activation_scale`) is the scale of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from llmcore.api import ConfigError, ModelConfig, QuantMethod

from llmcore_quantization import online
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.checkpoint import CheckpointMethod
from llmcore_quantization.formats.packed import (
    SCALES,
    Grid,
    Header,
    KVAlone,
    Packed,
    Stored,
    dtype_of,
    known,
    matrix,
    split,
    static_scale,
)
from llmcore_quantization.targets import in_layers, listed, names

SCALE = ("weight_scale_inv", "weight_scale")
INPUT_SCALE = ("input_scale", "activation_scale")


def make(quantization: Mapping[str, Any], config: ModelConfig) -> QuantMethod:
    """The QuantMethod for one checkpoint, which quantizes a plain one. Raises ConfigError for a variant that is not
    read."""
    if "quant_method" not in quantization:
        return online.fp8w8a8_b128(quantization, config)
    # A hf_quant_config.json of ModelOpt has everything in an object of its own.
    given = quantization.get("quantization") or quantization
    kv_alone = given.get("kv_cache_quant_algo") and not given.get("quant_algo")
    return CheckpointMethod(KVAlone() if kv_alone else FP8(given), config)


class FP8:
    """A Format."""

    name = "fp8"
    leaves = frozenset({"weight", *SCALE, *INPUT_SCALE, "output_scale"})
    early: frozenset[str] = frozenset()
    split = staticmethod(split)

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        known(
            "ModelOpt" if "quant_algo" in quantization else self.name,
            quantization,
            {"fmt": ("e4m3", "float8_e4m3fn"), "quant_algo": ("fp8",), "activation_scheme": ("dynamic", "static")},
        )
        block = quantization.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        ):
            raise ConfigError(f"weight_block_size in quantization_config is {block!r}; it has to be [rows, columns]")
        self._block = None if block is None else (block[0], block[1])
        self._static = quantization.get("activation_scheme") == "static" or "quant_algo" in quantization
        if self._static and block is not None:
            raise ConfigError(
                "activation_scheme in quantization_config is 'static', and weights with a scale per block are read "
                "with 'dynamic' only; use another checkpoint of the model"
            )
        self._plain = names(quantization, "modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")

    @property
    def _inputs(self) -> Any:
        return "static" if self._static else "row" if self._block is None else "group"

    def scheme(self, module: str) -> Scheme | None:
        """The scheme by config alone."""
        if not in_layers(module) or listed(module, self._plain):
            return None
        group = 0 if self._block is None else self._block[1]
        return Scheme(codes="e4m3", group=group, scale="f32", inputs=self._inputs)

    def packed(self, module: str, headers: Mapping[str, Header], early: Mapping[str, torch.Tensor]) -> Packed | None:
        """The module, from its headers."""
        if not dtype_of(headers, "weight").startswith("F8_"):
            return None
        outputs, inputs = matrix(module, headers, "weight")
        scale = _first(SCALE if self._block else SCALE[::-1], headers)
        rows, columns = self._block or (_rows(headers, scale, outputs), inputs)
        grid = Grid(outputs, inputs, rows, columns)
        tensors = {
            "codes": Stored("weight", ((outputs, inputs),), ("F8_E4M3",), torch.Tensor.contiguous),
            "scale": Stored(scale, grid.shapes, tuple(SCALES), grid.spread),
        }
        if self._static:
            tensors["input_scale"] = static_scale(_first(INPUT_SCALE, headers))
        scheme = grid.scheme("e4m3", dtype_of(headers, scale), inputs=self._inputs)
        return Packed(outputs=outputs, inputs=inputs, cell=grid.cell, scheme=scheme, tensors=tensors)


def _first(leaves: Sequence[str], headers: Mapping[str, Header]) -> str:
    """The first leaf that is there, else the first."""
    return next((leaf for leaf in leaves if leaf in headers), leaves[0])


def _rows(headers: Mapping[str, Header], scale: str, outputs: int) -> int:
    """The outputs that share a scale without blocks: one if there are several scales, else all."""
    shape = headers.get(scale, ((), ""))[0]
    return outputs if not shape or shape[0] == 1 else 1
