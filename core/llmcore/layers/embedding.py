"""The two ends of a language model: the embedding table and the head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from llmcore.layers.build import Build
from llmcore.layers.layer import Layer
from llmcore.layers.linear import Linear
from llmcore.layers.step import Bucketed
from llmcore.ops.sample import BLOCK
from llmcore.weights.map import Placement, Shard

VOCABULARY = Shard("attn_tp", 0, BLOCK, pad=True)
"""The cut of the vocabulary: the ranks have whole blocks of a draw, all the same number of them."""

GATHERED = 1 << 26
"""The most logits that are gathered at a time, so that their copies stay small."""


def held_tokens(build: Build, vocab: int) -> tuple[int, int]:
    """(first, number) of the tokens of a vocabulary for which this rank computes logits. The last ranks may have none.

    All shares of the head have one size. Rows of a share beyond the number are padding.
    """
    ranks, share = build.mesh.size(VOCABULARY.group), build.mesh.share(vocab, VOCABULARY, "vocabulary")
    return VOCABULARY.held(vocab, share, build.mesh.rank(VOCABULARY.group), ranks)


class Embedding(Layer):
    """Looks up rows of a table. Every rank has the whole table, padded as a head is that shares it."""

    def __init__(self, build: Build, vocab: int, size: int) -> None:
        super().__init__()
        ranks = build.mesh.size(VOCABULARY.group)
        rows = vocab if ranks == 1 else ranks * build.mesh.share(vocab, VOCABULARY, "vocabulary")
        self.weight = build.empty(rows, size)
        self.placements = {"weight": Placement(totals={"": vocab})}
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

    The ranks share the vocabulary, and each has all logits after `forward`. A family whose logits are computed in
    another way overrides `scores`.

    `weight`: the embedding's parameter if the two are tied.
    """

    def __init__(self, build: Build, size: int, vocab: int, *, weight: nn.Parameter | None = None) -> None:
        ranks = build.mesh.size(VOCABULARY.group)
        super().__init__(build, size, vocab, weight=weight, shard=VOCABULARY if ranks > 1 else None)
        self.vocab = vocab
        self._held = held_tokens(build, vocab)[1]
        self._gather = build.comm("all_gather", VOCABULARY.group, self.shape.outputs)
        if ranks > 1:
            self.shape = replace(self.shape, whole=True)

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """x [S, size] -> [S, vocab]."""
        if self._gather is None:
            return self.scores(x, step)
        rows = max(1, GATHERED // (self.shape.outputs * self.build.mesh.size(VOCABULARY.group)))
        parts = torch.split(self.scores(x, step), rows)
        return torch.cat([self._gather[step.bucket](part)[:, : self.vocab] for part in parts])

    def own(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """x [S, size] -> [S, N]: the logits of this rank's part of the vocabulary, without padding."""
        return self.scores(x, step)[:, : self._held]

    def scores(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """x [S, size] -> [S, share], with any numbers beyond the vocabulary."""
        return super().forward(x, step)


class CappedHead(LMHead):
    """A head that returns cap * tanh(logits / cap), in f32."""

    def __init__(self, build: Build, size: int, vocab: int, *, cap: float, weight: nn.Parameter | None = None) -> None:
        super().__init__(build, size, vocab, weight=weight)
        self.cap = cap

    def scores(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """x [S, size] -> [S, share] f32."""
        return super().scores(x, step).float().div_(self.cap).tanh_().mul_(self.cap)
