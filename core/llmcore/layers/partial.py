"""A tensor whose sum over the ranks has not been made yet, so that a norm can make it together with its own work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmcore.layers.step import Bucketed
from llmcore.ops import Op


@dataclass(frozen=True)
class Partial:
    """Rows of which every rank has a summand, [T, size]. `reduce`: op comm.all_reduce over the ranks of `group`.

    A linear or a mixture of experts with `partial` returns it in place of a tensor, if its inputs are cut over more
    than one rank. The `add` of a norm takes it. Nothing else does: an operation on it raises TypeError.
    """

    tensor: torch.Tensor
    group: str
    reduce: Sequence[Op]

    def __len__(self) -> int:
        """T."""
        return len(self.tensor)

    def sum(self, step: Bucketed) -> torch.Tensor:
        """The sum over the ranks [T, size], the same on every rank."""
        y: torch.Tensor = self.reduce[step.bucket](self.tensor)
        return y

    def rows(self, chosen: torch.Tensor) -> Partial:
        """Its rows `chosen` [S]."""
        return replace(self, tensor=self.tensor.index_select(0, chosen))


def total_of(summands: torch.Tensor, group: str, reduce: Sequence[Op], partial: bool, step: Bucketed) -> Any:
    """The sum of all ranks' `summands` [T, size], or the Partial that stands for it."""
    found = Partial(summands, group, reduce)
    return found if partial else found.sum(step)
