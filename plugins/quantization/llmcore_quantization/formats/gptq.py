"""GPTQ, as AutoGPTQ, GPTQModel and transformers save it.

`qweight` int32 [inputs * bits / 32, outputs], words along inputs; `qzeros` int32 [groups, outputs * bits / 32], words
along outputs; `scales` [groups, outputs]; `g_idx` int32 [inputs], the group of each input. The lowest bits of a word
come first. The weight is (q - z) * s. Format `gptq` stores z - 1, which wraps around for 0; `gptq_v2` stores z.
Sources: GPTQModel 7.7.0, nn_modules/qlinear/torch.py and utils/model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from llmcore.api import ConfigError, ModelConfig

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.checkpoint import CheckpointMethod
from llmcore_quantization.formats.packed import (
    FIX,
    HALF_OR_SINGLE,
    WORDS,
    Grid,
    Header,
    Packed,
    Stored,
    codes,
    dtype_of,
    fields,
    group_order,
    group_size,
    known,
    mapping,
    matrix,
    split,
    zeros,
)
from llmcore_quantization.targets import in_layers, listed, names, overridden

STORED_ZERO: Mapping[str, int] = {"gptq": 1, "gptq_v2": 0}
"""Format -> what is added to a stored zero."""


def make(quantization: Mapping[str, Any], config: ModelConfig) -> CheckpointMethod:
    """The QuantMethod for one checkpoint. Raises ConfigError for a variant that is not read."""
    return CheckpointMethod(GPTQ(quantization), config)


class GPTQ:
    """A Format."""

    name = "gptq"
    leaves = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    early = frozenset({"g_idx"})
    split = staticmethod(split)

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        self._config = dict(quantization)
        self._check(self._config)
        dynamic = mapping(quantization, "dynamic")
        self._dynamic = {pattern: mapping(dynamic, pattern) for pattern in dynamic}
        for values in self._dynamic.values():
            self._check({**self._config, **values})
        self._plain = names(quantization, "modules_to_not_convert")
        self._format = str(quantization.get("checkpoint_format") or quantization.get("format") or "gptq").lower()

    def _check(self, config: Mapping[str, Any]) -> None:
        if config.get("bits") is None:
            raise ConfigError("quantization_config of gptq lacks bits; add the bits of a weight, 4 or 8")
        known(
            self.name,
            config,
            {
                "bits": tuple(WORDS),
                "checkpoint_format": tuple(STORED_ZERO),
                "format": tuple(STORED_ZERO),
                "pack_dtype": ("int32",),
                "is_marlin_format": (False,),
            },
        )
        group_size(config, "group_size")

    def _values(self, module: str) -> Mapping[str, Any]:
        """The config of one module."""
        return {**self._config, **(overridden(module, self._dynamic) or {})}

    def scheme(self, module: str) -> Scheme | None:
        """The scheme by config alone."""
        quantized = in_layers(module) or (module == "lm_head" and self._config.get("lm_head"))
        if not quantized or listed(module, self._plain) or overridden(module, self._dynamic) is None:
            return None
        values = self._values(module)
        group = group_size(values, "group_size")
        return Scheme(
            codes=WORDS[values["bits"]],
            group=group,
            zeros=not values.get("sym", True),
            ordered=bool(values.get("desc_act")) and group > 0,
        )

    def packed(self, module: str, headers: Mapping[str, Header], early: Mapping[str, torch.Tensor]) -> Packed | None:
        """The module, from its headers and the group of each of its inputs."""
        values = self._values(module)
        bits: int = values["bits"]
        words, outputs = matrix(module, headers, "qweight")
        inputs = words * 32 // bits
        columns = group_size(values, "group_size") or inputs
        grid = Grid(outputs, inputs, 1, columns)
        groups, wide = grid.shape[1], -(-outputs * bits // 32)
        symmetric = values.get("sym", True)
        read = partial(_zeros, bits=bits, outputs=outputs, added=STORED_ZERO[self._format])
        order = self._order(module, early.get("g_idx"), inputs, columns, bool(values.get("desc_act")))
        tensors = {
            "codes": Stored("qweight", ((words, outputs),), ("I32",), partial(_codes, bits=bits)),
            "scale": Stored("scales", ((groups, outputs),), HALF_OR_SINGLE, grid.spread_from_rows),
        }
        stored = partial(Stored, "qzeros", ((groups, wide),), ("I32",))
        if not symmetric:
            tensors["zero"] = stored(partial(_spread_zeros, grid, bits, read))
        return Packed(
            outputs=outputs,
            inputs=inputs,
            cell=grid.cell,
            scheme=grid.scheme(
                WORDS[bits], dtype_of(headers, "scales"), zeros=not symmetric, ordered=order is not None
            ),
            tensors=tensors,
            order=order,
            checked=(stored(partial(_check_symmetric, module, bits, read)),) if symmetric else (),
        )

    def _order(
        self, module: str, g_idx: torch.Tensor | None, inputs: int, columns: int, wanted: bool
    ) -> torch.Tensor | None:
        if g_idx is None and wanted and columns < inputs:
            raise ConfigError(
                f"the checkpoint lacks {module}.g_idx, the group of each input, although quantization_config has "
                "desc_act; set desc_act to false if the inputs were not sorted, else download the weights again"
            )
        if g_idx is None:
            return None
        if g_idx.shape != (inputs,):
            raise ConfigError(
                f"{module}.g_idx is {list(g_idx.shape)}; it has to be the group of each of {inputs} inputs; {FIX}"
            )
        return group_order(g_idx, columns, f"{module}.g_idx")


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    return codes(fields(words.t(), bits), bits)


def _zeros(words: torch.Tensor, bits: int, outputs: int, added: int) -> torch.Tensor:
    """int32 [groups, words] -> u8 [outputs, groups], with the 1 that v1 has subtracted."""
    return torch.bitwise_and(fields(words, bits)[:, :outputs] + added, 2**bits - 1).t()


def _spread_zeros(
    grid: Grid, bits: int, read: Callable[[torch.Tensor], torch.Tensor], words: torch.Tensor
) -> torch.Tensor:
    return grid.spread(zeros(read(words), bits, grid.inputs))


def _check_symmetric(
    module: str, bits: int, read: Callable[[torch.Tensor], torch.Tensor], words: torch.Tensor
) -> torch.Tensor:
    """Raise ConfigError if a zero is not the middle of the range."""
    found, middle = read(words), 2 ** (bits - 1)
    if (found != middle).any():
        wrong = int(found[found != middle][0])
        raise ConfigError(
            f"{module}.qzeros has the zero point {wrong}, and with sym every one is {middle}; set sym in "
            "quantization_config to false, or checkpoint_format to the other of gptq and gptq_v2"
        )
    return found
