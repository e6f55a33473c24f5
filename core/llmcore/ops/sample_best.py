"""sample.best: the best score and its token in each row's part of the vocabulary.

Ranks that share a vocabulary exchange it. Then each knows the best score of whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, draw, size
from llmcore.ops.sample import BLOCK

SHAPES: tuple[Shape, ...] = ({"vocab": 1000, "ranks": 2}, {"vocab": 60, "ranks": 2})

TOLERANCE: Mapping[str, float] = {"f32": 0.0, "f16": 0.0, "bf16": 0.0}


def reference(logits: torch.Tensor, first: int) -> torch.Tensor:
    """logits [S, N] of any float type, of the tokens from `first` on -> [S, 2] f32: the best score, and its token.

    Of several tokens with the best score it is the first one. The score is infinity if a logit is NaN or infinite, and
    minus infinity in an empty part. Beside these is a token that is not read. Tokens up to 2**24 are exact in f32.
    """
    finite = torch.isfinite(logits).all(-1)
    score, place = torch.nn.functional.pad(logits.float(), (0, 1), value=-torch.inf).max(-1)
    token = first + place.clamp(max=logits.shape[1] - 1)
    return torch.stack((torch.where(finite, score, torch.inf), token.float()), -1)


def parts(logits: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Logits [S, V] in two parts and an empty one, each with its first token."""
    vocabulary = logits.shape[1]
    half = vocabulary // 2 // BLOCK * BLOCK
    for first, last in ((0, half), (half, vocabulary), (vocabulary, vocabulary)):
        yield logits[:, first:last], first


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, int]]:
    """Parts with equal scores, and with some that are not finite."""
    for tokens in SAMPLE_TOKENS[context.bucket]:
        logits = draw(context, tokens, size(context.shape, "vocab", 1000)) * 4
        logits[0, 7::30] = 60.0
        yield from parts(logits)
        logits[::3, 5], logits[1::3, -1], logits[2::3, 9] = torch.nan, torch.inf, -torch.inf
        yield from parts(logits)


def compared(
    got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The scores, their infinities, and of finite ones whether tokens differ."""
    (score, token), (wanted, right) = (columns[0].cpu().unbind(-1) for columns in (got, expected))
    yield "score", score, wanted
    yield "infinity", score.isposinf().float() - score.isneginf().float(), wanted.sign() * wanted.isinf()
    yield "other token", ((token != right) & wanted.isfinite()).float(), torch.zeros_like(wanted)


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): a rank reads its part once."""
    elements = size(shape, "tokens") * size(shape, "vocab") / size(shape, "ranks", 2)
    return size(shape, "element", 4) * elements, elements
