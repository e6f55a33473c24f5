"""A checkpoint in memory, and models of one parameter per module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from llmcore.weights.map import Placement
from torch import nn


class Held:
    """A checkpoint in memory."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def config(self) -> dict[str, Any]:
        return {}

    def generation_config(self) -> dict[str, Any]:
        return {}

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {name: (tuple(tensor.shape), "F32") for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, tensor in self._tensors.items():
            yield name, lambda tensor=tensor: tensor


class Cell(nn.Module):
    """One parameter with its placement."""

    def __init__(self, *shape: int, placement: Placement | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
        self.placements = {} if placement is None else {"weight": placement}


def model(**cells: Cell) -> nn.Module:
    whole = nn.Module()
    for name, cell in cells.items():
        whole.add_module(name, cell)
    return whole
