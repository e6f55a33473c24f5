"""A checkpoint as the engine opens it, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llmcore.weights.quant import find_quantization
from llmcore.weights.source import open_checkpoint
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.loaded_model import registry_for_tests
from llmcore_quantization import canonical, checkpoint
from llmcore_quantization.canonical import Scheme

REGISTRY = registry_for_tests()
HOST = torch.device("cpu")


class Opened:
    """A checkpoint as the engine reads it: the tensors that it has after the engine asked for `linears`."""

    def __init__(self, folder: Path, linears: Sequence[Sequence[str]] = (), dtype: Any = "f32") -> None:
        stored = open_checkpoint(REGISTRY, folder)
        found = find_quantization(REGISTRY, stored.config(), replace(CONFIG, dtype=dtype))
        assert found is not None
        method: Any = found.method
        wrapped = method.checkpoint(stored, HOST)
        methods = [method.method_for(modules) for modules in linears]
        self.schemes: list[Scheme | None] = [None if linear is None else linear.scheme for linear in methods]
        self.tensors: dict[str, torch.Tensor] = {}
        for name, read in wrapped.tensors():
            assert name not in self.tensors
            self.tensors[name] = read()
        names = checkpoint.DTYPE_NAMES
        held = {name: (tuple(tensor.shape), names[tensor.dtype]) for name, tensor in self.tensors.items()}
        assert held == wrapped.sizes()

    def meaning(self, module: str) -> torch.Tensor:
        """The weight that the canonical tensors of a module mean."""
        leaves = {leaf: self.tensors.get(f"{module}.{leaf}") for leaf in ("codes", "scale", "zero", "order")}
        assert leaves["codes"] is not None and leaves["scale"] is not None
        return canonical.dequantized(**leaves)
