"""The draw of ranks that share a vocabulary, from the logits that each has of its own.

Ranks exchange two numbers per row instead of logits: each part's best score and its token, then the weight of its
heaviest block and a token drawn from that. From equal logits the tokens are those of op `sample` on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from llmcore.layers.build import Build
from llmcore.layers.embedding import VOCABULARY, held_tokens
from llmcore.ops import Op
from llmcore.ops.sample import VARIANTS, Sampled, Sampler, SampleRows

OWN_VARIANTS = VARIANTS[:2]
"""The variants that need no whole rows. Filters and log-probabilities do."""

OPS = frozenset({"sample.best", "sample.part", "sample.pick", "comm.exchange"})
"""The ops of such a draw."""


@dataclass(frozen=True)
class OwnSampler:
    """A Sampler of this rank's part of the logits [S, N], which begins at token `first`.

    The other fields are ops. All ranks call it with the same rows, and all get the same result. `part`: None if every
    row takes its best token.
    """

    first: int
    best: Op
    exchange: Op
    part: Op | None
    pick: Op

    def __call__(self, logits: Tensor, rows: SampleRows) -> Sampled:
        """Draw a token for each row. Raises what an exchange raises if a rank is gone."""
        best = self.exchange(self.best(logits, self.first))
        drawn = best if self.part is None else self.exchange(self.part(logits, self.first, best, rows))
        tokens, finite = self.pick(best, drawn, rows.temperature)
        return Sampled(tokens=tokens, finite=finite)


def own_samplers(build: Build) -> Mapping[str, tuple[Sampler, ...]]:
    """By variant, a Sampler per token bucket for this rank's own logits; none if it has the whole vocabulary."""
    exchanges = build.comm("exchange", VOCABULARY.group, 2)
    if exchanges is None:
        return {}
    vocabulary = build.config.vocab_size
    ranks, first = build.mesh.size(VOCABULARY.group), held_tokens(build, vocabulary)[0]
    best, part, pick = (build.op(f"sample.{name}", vocab=vocabulary, ranks=ranks) for name in ("best", "part", "pick"))
    drawing = ((None,) * len(part), part)
    return {
        variant: tuple(OwnSampler(first, *ops) for ops in zip(best, exchanges, parts, pick, strict=True))
        for variant, parts in zip(OWN_VARIANTS, drawing, strict=True)
    }
