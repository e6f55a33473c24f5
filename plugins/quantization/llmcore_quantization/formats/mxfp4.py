"""mxfp4, read as plain weights: 4-bit floats with one power of two per 32 inputs.

A byte holds two inputs, the first in its low nibble. A nibble is a sign and one of `MAGNITUDES`; a scale s means
2^(s - 127). GPT-OSS stores the experts of a layer as `X_blocks` u8 [experts, outputs, inputs / 32, 16] and `X_scales`
u8 [experts, outputs, inputs / 32]. As in transformers, X is then [experts, inputs, outputs]; its outputs are those of
gate and up by turns. Source: transformers 5.23.0, integrations/mxfp4.py and modeling_gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from llmcore.api import ConfigError, ModelConfig

from llmcore_quantization.canonical import Scheme, unpacked
from llmcore_quantization.checkpoint import CheckpointMethod
from llmcore_quantization.formats.packed import FIX, Header, Packed, Stored, matrix, power

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32

BLOCKS, SCALES = "_blocks", "_scales"


def make(quantization: Mapping[str, Any], config: ModelConfig) -> CheckpointMethod:
    """The QuantMethod for one checkpoint. GPT-OSS's config has nothing to check."""
    return CheckpointMethod(MXFP4(), config)


class MXFP4:
    """A Format: the experts of GPT-OSS."""

    name = "mxfp4"
    leaves = frozenset({BLOCKS, SCALES})
    early: frozenset[str] = frozenset()

    def split(self, tensor: str) -> tuple[str, str]:
        """A stack's own name, and the suffix that its blocks or its scales have."""
        leaf = next((leaf for leaf in (BLOCKS, SCALES) if tensor.endswith(leaf)), "")
        return tensor.removesuffix(leaf), leaf

    def scheme(self, module: str) -> Scheme | None:
        """None: the experts become plain weights."""
        return None

    def packed(self, module: str, headers: Mapping[str, Header], early: Mapping[str, torch.Tensor]) -> Packed | None:
        """A stack of experts, from its headers."""
        shape, _ = headers.get(BLOCKS, ((), ""))
        if len(shape) != 4:
            raise ConfigError(
                f"{module}{BLOCKS} is {list(shape) or 'not there'}; it has to be [experts, outputs, groups, 16]; {FIX}"
            )
        experts, rows, groups, half = shape
        outputs, inputs = experts * rows, groups * half * 2
        blocks, scales = (experts, rows, groups, GROUP // 2), (experts, rows, groups)
        return Packed(
            outputs=outputs,
            inputs=inputs,
            cell=(1, GROUP),
            scheme=None,
            tensors={
                "codes": Stored(BLOCKS, (blocks,), ("U8",), partial(torch.reshape, shape=(outputs, inputs // 2))),
                "scale": Stored(SCALES, (scales,), ("U8",), partial(torch.reshape, shape=(outputs, groups))),
            },
            dequantize=dequantized,
            experts=experts,
        )


def packed(module: str, headers: Mapping[str, Header], blocks: str, scales: str) -> Packed:
    """A matrix: its leaf `blocks` is u8 [outputs, inputs / 2], its leaf `scales` u8 [outputs, inputs / 32]."""
    outputs, half = matrix(module, headers, blocks)
    grid = (outputs, -(-half * 2 // GROUP))
    return Packed(
        outputs=outputs,
        inputs=half * 2,
        cell=(1, GROUP),
        scheme=None,
        tensors={
            "codes": Stored(blocks, ((outputs, half),), ("U8",), torch.Tensor.contiguous),
            "scale": Stored(scales, (grid,), ("U8", "F8_E8M0"), _bytes),
        },
        dequantize=dequantized,
    )


def _bytes(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8)


def dequantized(
    codes: torch.Tensor, scale: torch.Tensor, order: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """codes u8 [N, K / 2], scale u8 [N, K / 32] -> the weight [N, K], computed in f32."""
    nibbles = unpacked(codes).long()
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=codes.device)[nibbles]
    scales = power(scale).repeat_interleave(GROUP, 1)[:, : values.shape[1]]
    return (values * scales).to(dtype)
