"""Op `sample`: from logits to the next token of each row.

A row passes these stages, in this order:

1. repetition, frequency and presence penalties;
2. rises of scores with the answer's length;
3. logit bias and masked stop ids;
4. the mask of allowed tokens;
5. division by the temperature;
6. top-k;
7. top-p over the tokens that top-k kept, renormalized;
8. min-p;
9. typical-p over the tokens that the other filters kept, renormalized;
10. the draw.

Hugging Face's processors and text-generation-inference have the same order. Filters are thresholds: a filter also
keeps scores equal to the last one it keeps. So its result does not depend on the order in which a kernel sorts.

Typical-p (locally typical sampling, arXiv:2202.00666) keeps the tokens whose surprise, -log p, is nearest to the
expected surprise, the entropy H. It keeps the fewest tokens that have a mass of `typical_p`. Kernels compute neither
-log p nor H. With scores s and Z = sum of e^s, -log p is log Z - s, and H is log Z - E[s]. So |-log p - H| is
|s - E[s]|: the tokens within some distance of the mean score stay. E[s] is summed in f64 and rounded to f32; distances
are f32.

The draw is Gumbel-max in two levels. First it draws a block of BLOCK tokens, argmax(log of the block's mass + gumbel),
then a token of that block, argmax(score + gumbel). If several are equal, the first one wins. This needs a few hundred
random numbers, not one per token, and is an exact draw from the tokens that the filters kept. The result depends on
the row's own logits, parameters, seed, choice and position, never on the rest of the batch.

Log-probabilities come from the raw logits, before penalties, bias, temperature and filters. Logits have the model's
dtype; everything computed from them is f32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmcore.api.specs import OpContext
from llmcore.ops import DTYPES, Shape, size
from llmcore.ops import draw as numbers
from llmcore.ops.philox import bits, gumbel

VARIANTS = ("greedy", "temperature", "filtered", "full")
"""The most that a step's rows need. Each variant can do everything that the ones before it can. A kernel is made for
one variant, `shape["variant"]`."""

SHAPES: tuple[Shape, ...] = tuple({"variant": variant, "vocab": 1000} for variant in VARIANTS)

BLOCK = 128
"""Number of tokens in a block of the draw's first level."""

TOLERANCE: Mapping[str, float] = {"f32": 1e-5, "f16": 1e-5, "bf16": 1e-5}
"""Applies to log-probabilities. Tokens and flags must be equal."""


LONGEST_RISE = 60.0
"""Natural logarithm of the largest factor of a rise: f32 can hold any score times e to this."""


@dataclass(frozen=True, kw_only=True)
class Rises:
    """D scores that rise with the answer's length; a token has at most one entry per row.

    Entry d adds |score| * (exp(min(rate[d] * past, LONGEST_RISE)) - 1), where `past` is the row's position minus
    start[d], at least 0.
    """

    row: Tensor
    """[D] int64, the row."""
    token: Tensor
    """[D] int64, the token whose score rises."""
    start: Tensor
    """[D] int32, the position from which on it rises."""
    rate: Tensor
    """[D] f32, not negative: the rise of the exponent per token."""


@dataclass(frozen=True, kw_only=True)
class Adjust:
    """The changes that the `full` variant makes to scores before the temperature, for S rows and with B biases."""

    ids: Tensor
    """[S, L] int32, the tokens known so far."""
    length: Tensor
    """[S] number of valid tokens in each row of `ids`."""
    repetition: Tensor
    """[S] penalty that divides positive scores and multiplies others."""
    presence: Tensor
    """[S] penalty for each token that occurs."""
    frequency: Tensor
    """[S] penalty for each time that a token occurs."""
    repeat_from: Tensor
    """[S] first index in `ids` that counts for `repetition`."""
    count_from: Tensor
    """[S] first index in `ids` that counts for `presence` and `frequency`."""
    bias_row: Tensor
    """[B] row of each bias."""
    bias_token: Tensor
    """[B] token of each bias."""
    bias_value: Tensor
    """[B] number that each bias adds to the token's score."""
    bias_until: Tensor
    """[B] position from which on the bias no longer applies."""
    rises: Rises | None = None


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Masks of allowed tokens. The `full` variant removes all other tokens."""

    words: Tensor
    """[M, ceil(V / 32)] int32, M masks: token t is allowed if bit t % 32 of word t // 32 is 1."""
    of: Tensor
    """[S] int32, the mask of each row; -1: none."""


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """The sampling parameters of S rows, tensors [S]."""

    temperature: Tensor
    """f32; 0: greedy."""
    top_k: Tensor
    """int32; 0: all tokens."""
    top_p: Tensor
    """f32."""
    min_p: Tensor
    """f32."""
    seed: Tensor
    """int64."""
    choice: Tensor
    """int64, the number of the choice."""
    position: Tensor
    """int64, the number of output tokens before this one."""
    typical_p: Tensor | None = None
    """f32 (1: all tokens); None if no row asks for it. Only the `full` variant reads it."""
    adjust: Adjust | None = None
    masks: Masks | None = None
    logprobs: int | None = None
    """Number of best tokens to report; None: report no log-probabilities at all."""

    def to(self, device: torch.device) -> SampleRows:
        """The same rows on `device`. Works only for rows without `typical_p`, `adjust` and `masks`."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The drawn tokens of S rows, with log-probabilities if the rows asked for them."""

    tokens: Tensor
    """[S] int32."""
    finite: Tensor
    """[S] bool, False if a row's logits contain NaN or infinity."""
    logprobs: Tensor | None = None
    """[S] f32, of the drawn tokens."""
    top_ids: Tensor | None = None
    """[S, k] int32, best first."""
    top_logprobs: Tensor | None = None
    """[S, k] f32, best first."""


Sampler = Callable[[Tensor, SampleRows], Sampled]
"""A function from logits [S, V] of any float type, and their S rows, to the drawn tokens."""


def adjusted(logits: Tensor, rows: SampleRows, adjust: Adjust) -> Tensor:
    """Scores [S, V] f32 after penalties, rises and biases."""
    repeated = _counts(logits, adjust, adjust.repeat_from) > 0
    factor = adjust.repetition[:, None]
    scores = torch.where(repeated, torch.where(logits > 0, logits / factor, logits * factor), logits)
    counts = _counts(logits, adjust, adjust.count_from)
    scores = scores - adjust.frequency[:, None] * counts - adjust.presence[:, None] * (counts > 0)
    if adjust.rises is not None:
        scores = raised(scores, rows.position, adjust.rises)
    active = rows.position[adjust.bias_row] < adjust.bias_until
    bias = torch.where(active, adjust.bias_value, 0.0)
    return scores.index_put_((adjust.bias_row, adjust.bias_token), bias, accumulate=True)


def raised(scores: Tensor, position: Tensor, rises: Rises) -> Tensor:
    """Scores [S, V] after `rises`, which depend on the rows' `position` [S]."""
    old = scores[rises.row, rises.token]
    past = (position[rises.row] - rises.start).clamp(min=0).float()
    growth = torch.exp((rises.rate * past).clamp(max=LONGEST_RISE)) - 1.0
    return scores.index_put((rises.row, rises.token), old + old.abs() * growth)


def masked(scores: Tensor, masks: Masks) -> Tensor:
    """Scores [S, V] with minus infinity for tokens that a row's mask does not allow."""
    bits = torch.arange(32, dtype=torch.int32, device=scores.device)
    allowed = (masks.words[:, :, None] >> bits & 1).view(masks.words.shape[0], -1)[:, : scores.shape[1]] != 0
    allowed = allowed[masks.of.clamp(min=0).long()] | (masks.of < 0)[:, None]
    return scores.masked_fill(~allowed, -torch.inf)


def _counts(logits: Tensor, adjust: Adjust, first: Tensor) -> Tensor:
    """Counts [S, V] of each token in a row's valid ids from index `first` [S] on."""
    at = torch.arange(adjust.ids.shape[1], device=logits.device)
    counted = (at >= first[:, None]) & (at < adjust.length[:, None])
    return torch.zeros_like(logits).scatter_add_(1, adjust.ids.long(), counted.to(logits.dtype))


def floors(scores: Tensor, rows: SampleRows) -> Tensor:
    """[S, 1] the lowest score of each row that top-k, top-p and min-p keep.

    `scores` [S, V] are already divided by the temperature.
    """
    best_first = scores.sort(dim=-1, descending=True).values
    vocabulary = scores.shape[1]
    wanted = torch.where(rows.top_k > 0, rows.top_k, vocabulary).clamp(max=vocabulary).long()
    floor = best_first.gather(1, wanted[:, None] - 1)
    best = best_first[:, :1]
    mass = torch.where(best_first >= floor, torch.exp(best_first - best), 0.0).double()
    before = mass.cumsum(-1) - mass
    within = before < rows.top_p[:, None].double() * mass.sum(-1, keepdim=True)
    within |= rows.top_p[:, None] >= 1.0
    kept = within.sum(-1, keepdim=True).clamp(min=1)
    floor = torch.maximum(floor, best_first.gather(1, kept - 1))
    return torch.maximum(floor, best + torch.log(rows.min_p[:, None]))


def typical(scores: Tensor, share: Tensor) -> Tensor:
    """[S, V] bool: True for tokens that typical-p keeps; `share` [S] is `typical_p`.

    `scores` [S, V] are already divided by the temperature, with minus infinity for tokens that other filters removed.
    """
    inside = scores > -torch.inf
    mass = torch.exp(scores - scores.max(-1, keepdim=True).values).double()
    total = mass.sum(-1, keepdim=True)
    center = (mass * scores.masked_fill(~inside, 0.0)).sum(-1, keepdim=True) / total
    distance = (scores - center.float()).abs()
    nearest, order = distance.sort(dim=-1)
    enough = share[:, None].double() * total
    last = (mass.gather(1, order).cumsum(-1) < enough).sum(-1, keepdim=True).clamp(max=scores.shape[1] - 1)
    return (distance <= nearest.gather(1, last)) | (share[:, None] >= 1.0)


def with_logprobs(logits: Tensor, tokens: Tensor, finite: Tensor, k: int | None) -> Sampled:
    """The result; unless `k` is None, with log-probabilities of the raw logits [S, V] f32 and the `k` best tokens."""
    if k is None:
        return Sampled(tokens=tokens, finite=finite)
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    top = torch.topk(logits, k, dim=-1)
    return Sampled(
        tokens=tokens,
        finite=finite,
        logprobs=(logits.gather(1, tokens[:, None].long()) - total)[:, 0],
        top_ids=top.indices.int(),
        top_logprobs=top.values - total,
    )


def draw(scores: Tensor, rows: SampleRows) -> Tensor:
    """[S] int64: one token of each row.

    `scores` [S, V] are already divided by the temperature, with minus infinity for tokens that filters removed.
    """
    return heaviest(scores, scores.max(-1, keepdim=True).values, rows)[1]


def heaviest(scores: Tensor, best: Tensor, rows: SampleRows, first: int = 0) -> tuple[Tensor, Tensor]:
    """Of each row, the greatest noisy log mass of a block, [S] f32, and a token drawn from that block, [S] int64.

    `scores` [S, N] are those of `draw`, or the part of them from token `first` on, a multiple of BLOCK. `best` [S, 1]:
    the best scores of whole rows. An empty part has minus infinity.
    """
    vocabulary = scores.shape[1]
    blocks = max(1, -(-vocabulary // BLOCK))
    whole = torch.nn.functional.pad(scores, (0, blocks * BLOCK - vocabulary), value=-torch.inf)
    mass = torch.exp(whole - best).view(-1, blocks, BLOCK).sum(-1, dtype=torch.float64)
    index = torch.arange(blocks, device=scores.device)
    noisy = mass.log().float() + noise(rows, first // BLOCK + index, 1)
    block = noisy.argmax(-1, keepdim=True)
    tokens = block * BLOCK + torch.arange(BLOCK, device=scores.device)
    place = (whole.gather(1, tokens) + noise(rows, first + tokens, 0)).argmax(-1, keepdim=True)
    return noisy.gather(1, block)[:, 0], first + tokens.gather(1, place)[:, 0].clamp(max=vocabulary - 1)


def noise(rows: SampleRows, index: Tensor, level: int) -> Tensor:
    """Gumbel numbers [S, N] for indices [N] or [S, N]. Level 0 is for tokens, level 1 for blocks."""
    return gumbel(bits(rows.seed[:, None], rows.choice[:, None], rows.position[:, None], index, level))


def reference(logits: Tensor, rows: SampleRows) -> Sampled:
    """Draw one token per row of logits [S, V] of any float type. Handles every variant; never waits for the device."""
    logits = logits.float()
    finite = torch.isfinite(logits).all(-1)
    scores = logits if rows.adjust is None else adjusted(logits, rows, rows.adjust)
    if rows.masks is not None:
        scores = masked(scores, rows.masks)
    hot = rows.temperature > 0
    tempered = scores / torch.where(hot, rows.temperature, 1.0)[:, None]
    kept = tempered.masked_fill(tempered < floors(tempered, rows), -torch.inf)
    if rows.typical_p is not None:
        kept = kept.masked_fill(~typical(kept, rows.typical_p), -torch.inf)
    drawn = draw(kept, rows)
    tokens = torch.where(hot, drawn, scores.argmax(-1)).int()
    return with_logprobs(logits, tokens, finite, rows.logprobs)


def plain_rows(count: int, **columns: float) -> SampleRows:
    """`count` rows that sample from the model's own distribution; `columns` replaces parameters of all rows."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), columns.get(name, default), dtype=dtype)

    return SampleRows(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=column("seed", 0, torch.int64),
        choice=column("choice", 0, torch.int64),
        position=column("position", 0, torch.int64),
        typical_p=column("typical_p", 1.0, torch.float32) if "typical_p" in columns else None,
    )


def samples(context: OpContext) -> Iterator[tuple[Tensor, SampleRows]]:
    """Inputs for which every kernel must agree with the reference."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = size(context.shape, "vocab", 1000)
    logits = (torch.randn(4, vocabulary, generator=generator) * 4).to(DTYPES[context.dtype])
    yield logits, plain_rows(4, temperature=0.0)
    filters: tuple[dict[str, float], ...] = (
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.05},
        {"top_k": 9, "top_p": 0.5},
    )
    wanted = {"greedy": 0, "temperature": 1}.get(str(context.shape.get("variant")), len(filters))
    for position, columns in enumerate(filters[:wanted]):
        yield logits, plain_rows(4, temperature=0.8, seed=-3, position=position, **columns)
    if context.shape.get("variant") == "full":
        # A mask that allows one token, a mask that allows most tokens and serves two rows, and a row without a mask.
        words = torch.full((3, -(-vocabulary // 32)), -1, dtype=torch.int32)
        words[0], words[0, vocabulary // 64] = 0, 2
        words[1, ::3] = 1 << 30
        masks = Masks(words=words, of=torch.tensor([0, 1, -1, 1], dtype=torch.int32))
        for columns in ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 5, "top_p": 0.7}):
            yield logits, replace(plain_rows(4, seed=5, **columns), masks=masks)
        yield logits, plain_rows(4, temperature=0.8, seed=7, typical_p=0.2)
        rows = plain_rows(4, temperature=0.8, seed=9, typical_p=0.95, top_k=50, top_p=0.9)
        yield logits, replace(rows, masks=masks)


def timed(context: OpContext, tokens: int) -> Iterator[tuple[Tensor, SampleRows]]:
    """Rows that need everything that the variant can do, except the penalties of `full`."""
    logits = numbers(context, tokens, size(context.shape, "vocab", 1000)) * 4
    variant = context.shape.get("variant")
    columns = {} if variant in ("greedy", "temperature") else {"top_k": 50, "top_p": 0.9}
    rows = plain_rows(tokens, temperature=0.0 if variant == "greedy" else 0.8, **columns)
    yield logits, rows.to(logits.device)


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops) of one pass over the logits, without sorting."""
    elements = size(shape, "tokens") * size(shape, "vocab")
    return float(shape.get("element") or 4) * elements, 4.0 * elements
