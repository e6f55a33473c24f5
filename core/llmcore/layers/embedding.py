"""The two ends of a language model: the embedding table and the head."""

from __future__ import annotations

import torch
from torch import nn

from llmcore.layers.build import Build
from llmcore.layers.layer import Layer
from llmcore.layers.linear import Linear
from llmcore.layers.step import Bucketed


class Embedding(Layer):
    """Looks up rows of a table. Every rank has the whole table."""

    def __init__(self, build: Build, vocab: int, size: int) -> None:
        super().__init__()
        self.weight = build.empty(vocab, size)
        self._lookup = build.op("embedding", vocab=vocab, size=size)

    def forward(self, tokens: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """tokens [T] int64 -> [T, size]."""
        y: torch.Tensor = self._lookup[step.bucket](tokens, self.weight)
        return y


class ScaledEmbedding(Embedding):
    """Rows of a table times `factor`. The factor is rounded to the model's type first."""

    def __init__(self, build: Build, vocab: int, size: int, factor: float) -> None:
        super().__init__(build, vocab, size)
        self.factor = float(torch.tensor(factor, dtype=build.dtype))

    def forward(self, tokens: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """tokens [T] int64 -> [T, size]."""
        return super().forward(tokens, step) * self.factor


class LMHead(Linear):
    """Maps hidden states to logits in the model's dtype. The sampler computes in f32.

    `weight`: the embedding's parameter if the two are tied.
    """

    def __init__(self, build: Build, size: int, vocab: int, *, weight: nn.Parameter | None = None) -> None:
        super().__init__(build, size, vocab, weight=weight)


class CappedHead(LMHead):
    """A head that returns cap * tanh(logits / cap), in f32."""

    def __init__(self, build: Build, size: int, vocab: int, *, cap: float, weight: nn.Parameter | None = None) -> None:
        super().__init__(build, size, vocab, weight=weight)
        self.cap = cap

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """x [S, size] -> [S, vocab] f32."""
        return super().forward(x, step).float().div_(self.cap).tanh_().mul_(self.cap)
