"""AWQ of version gemm, as AutoAWQ and GPTQModel save it.

`qweight` int32 [inputs, outputs / 8] and `qzeros` int32 [groups, outputs / 8]: nibble i of a word is its output
`ORDER[i]`. `scales` [groups, outputs]. The weight is (q - z) * s. Source: AutoAWQ 0.2.9, utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from llmcore.api import ConfigError, ModelConfig

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.checkpoint import CheckpointMethod
from llmcore_quantization.formats.packed import (
    HALF_OR_SINGLE,
    Grid,
    Header,
    Packed,
    Stored,
    codes,
    dtype_of,
    fields,
    group_size,
    known,
    matrix,
    split,
    zeros,
)
from llmcore_quantization.targets import in_layers, listed, names

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def make(quantization: Mapping[str, Any], config: ModelConfig) -> CheckpointMethod:
    """The QuantMethod for one checkpoint. Raises ConfigError for a variant that is not read."""
    return CheckpointMethod(AWQ(quantization), config)


class AWQ:
    """A Format."""

    name = "awq"
    leaves = frozenset({"qweight", "qzeros", "scales"})
    early: frozenset[str] = frozenset()
    split = staticmethod(split)

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        known(
            self.name,
            quantization,
            {
                "bits": (BITS,),
                "w_bit": (BITS,),
                **dict.fromkeys(("version", "format", "checkpoint_format"), ("gemm",)),
            },
        )
        if quantization.get("backend") == "llm-awq":
            raise ConfigError(
                "backend in quantization_config is 'llm-awq', which orders its words for one CUDA kernel; use a "
                "checkpoint that AutoAWQ saved with version gemm"
            )
        self._group = group_size(quantization, "group_size", "q_group_size")
        self._plain = names(quantization, "modules_to_not_convert")

    def scheme(self, module: str) -> Scheme | None:
        """The scheme by config alone."""
        quantized = in_layers(module) and not listed(module, self._plain)
        return Scheme(codes="u4", group=self._group, zeros=True) if quantized else None

    def packed(self, module: str, headers: Mapping[str, Header], early: Mapping[str, torch.Tensor]) -> Packed | None:
        """The module, from its headers."""
        inputs, words = matrix(module, headers, "qweight")
        grid = Grid(8 * words, inputs, 1, self._group or inputs)
        groups = grid.shape[1]
        return Packed(
            outputs=grid.outputs,
            inputs=inputs,
            cell=grid.cell,
            scheme=grid.scheme("u4", dtype_of(headers, "scales"), zeros=True),
            tensors={
                "codes": Stored("qweight", ((inputs, words),), ("I32",), _codes),
                "scale": Stored("scales", ((groups, grid.outputs),), HALF_OR_SINGLE, grid.spread_from_rows),
                "zero": Stored("qzeros", ((groups, words),), ("I32",), partial(_zeros, grid)),
            },
        )


def _codes(words: torch.Tensor) -> torch.Tensor:
    return codes(_outputs(words), BITS)


def _zeros(grid: Grid, words: torch.Tensor) -> torch.Tensor:
    return grid.spread(zeros(_outputs(words), BITS, grid.inputs))


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [X, outputs / 8] -> u8 [outputs, X]."""
    order = torch.tensor(ORDER, device=words.device).argsort()
    return fields(words, BITS).view(*words.shape, 8)[..., order].flatten(-2).t()
