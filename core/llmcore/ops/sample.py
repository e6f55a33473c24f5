"""Op `sample`: from logits to the next token of each row.

What happens to a row, in this order: repetition, frequency and presence penalties; what grows with the answer's
length; logit bias and masked stop ids; the mask of allowed tokens; division by the temperature; top-k; top-p over
what top-k left, renormalized; min-p; typical-p over what these left, renormalized; a draw. Hugging Face's processors
have this order, and so has text-generation-inference. Filters are thresholds: scores equal to the last one kept stay
in too, so a filter does not depend on how a kernel sorts.

Typical-p (locally typical sampling, arXiv:2202.00666) keeps the tokens whose surprise, -log p, is nearest to the
expected surprise, the entropy H: as few of them as have a mass of `typical_p`. Kernels compute neither. With scores s
and Z = sum of e^s, -log p is log Z - s, and H is log Z - E[s]. So |-log p - H| = |s - E[s]|, and the tokens that stay
are those within some distance of the mean score. E[s] is summed in f64 and rounded to f32; distances are f32.

The draw is Gumbel-max in two levels, so that it takes some hundred random numbers and not one per token: first a
block of BLOCK tokens, argmax(log of the block's mass + gumbel), then a token in it, argmax(score + gumbel), the first
of equals each time. That is an exact draw from what the filters kept. It depends on the row's own logits, parameters,
seed, choice and position, never on the batch around it. Log-probabilities are those of the raw logits, before
penalties, bias, temperature and filters. Logits have the model's dtype; all that is computed from them is f32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmcore.ops import DTYPES, Shape, size
from llmcore.ops import draw as numbers
from llmcore.ops.philox import bits, gumbel
from llmcore.specs import OpContext

VARIANTS = ("greedy", "temperature", "filtered", "full")
"""What a step needs at most; each can do what those before it do. A kernel is made for one, `shape["variant"]`."""

SHAPES: tuple[Shape, ...] = tuple({"variant": variant, "vocab": 1000} for variant in VARIANTS)

BLOCK = 128
"""Tokens whose mass is drawn for at once."""

TOLERANCE: Mapping[str, float] = {"f32": 1e-5, "f16": 1e-5, "bf16": 1e-5}
"""Of log-probabilities; tokens and flags are equal."""


LONGEST_RISE = 60.0
"""Most by which a rise may be multiplied, as a natural logarithm: f32 holds any score times e to this."""


@dataclass(frozen=True, kw_only=True)
class Rises:
    """Scores that rise with the answer's length: `token` [D] of row `row` [D], both int64.

    Entry d adds |score| * (exp(min(rate[d] * past, LONGEST_RISE)) - 1), where `past` is how far the row's position
    lies beyond `start[d]`. `rate` [D] f32 is not negative, `start` [D] int32; a token has one entry per row.
    """

    row: Tensor
    token: Tensor
    start: Tensor
    rate: Tensor


@dataclass(frozen=True, kw_only=True)
class Adjust:
    """What the `full` variant adds to or takes from scores before the temperature. S rows, B biases.

    `ids` [S, L] int32: tokens known so far, `length` [S] of them valid. `repetition` [S] counts those from
    `repeat_from` [S] on, `presence` and `frequency` [S] those from `count_from` [S] on. Bias b adds `bias_value[b]`
    to token `bias_token[b]` of row `bias_row[b]` while the row's position is below `bias_until[b]`.
    """

    ids: Tensor
    length: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    repeat_from: Tensor
    count_from: Tensor
    bias_row: Tensor
    bias_token: Tensor
    bias_value: Tensor
    bias_until: Tensor
    rises: Rises | None = None


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Which tokens may be drawn: the `full` variant takes all others.

    `words` [M, ceil(V / 32)] int32, M masks: token t is allowed where bit t % 32 of word t // 32 is 1. `of` [S] int32:
    the mask of each row, -1 for none.
    """

    words: Tensor
    of: Tensor


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """The parameters of S rows: f32 `temperature` (0: greedy), `top_p`, `min_p`; int32 `top_k` (0: all).

    `seed`, `choice`, `position` are int64; `position` counts a row's output tokens before this one. `typical_p`: f32
    (1: all), None if no row asks for it; only the `full` variant takes it. `logprobs`: how many of the best tokens to
    report, None for no log-probabilities at all.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor
    typical_p: Tensor | None = None
    adjust: Adjust | None = None
    masks: Masks | None = None
    logprobs: int | None = None

    def to(self, device: torch.device) -> SampleRows:
        """The same columns on `device`; for rows without `adjust` or `masks`."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """`tokens` [S] int32; `finite` [S] bool: False where a row's logits hold NaN or infinity.

    `logprobs` [S] f32 of the drawn tokens; `top_ids` [S, k] int32 and `top_logprobs` [S, k] f32, best first.
    """

    tokens: Tensor
    finite: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


Sampler = Callable[[Tensor, SampleRows], Sampled]
"""logits [S, V] of any float type, and their S rows."""


def adjusted(logits: Tensor, rows: SampleRows, adjust: Adjust) -> Tensor:
    """Scores [S, V] after penalties and biases; all are f32."""
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
    """Scores [S, V] in which some have risen, by the rows' `position` [S]."""
    old = scores[rises.row, rises.token]
    past = (position[rises.row] - rises.start).clamp(min=0).float()
    growth = torch.exp((rises.rate * past).clamp(max=LONGEST_RISE)) - 1.0
    return scores.index_put((rises.row, rises.token), old + old.abs() * growth)


def masked(scores: Tensor, masks: Masks) -> Tensor:
    """Scores [S, V], minus infinity where a row's mask does not allow a token."""
    bits = torch.arange(32, dtype=torch.int32, device=scores.device)
    allowed = (masks.words[:, :, None] >> bits & 1).view(masks.words.shape[0], -1)[:, : scores.shape[1]] != 0
    allowed = allowed[masks.of.clamp(min=0).long()] | (masks.of < 0)[:, None]
    return scores.masked_fill(~allowed, -torch.inf)


def _counts(logits: Tensor, adjust: Adjust, first: Tensor) -> Tensor:
    """How often each token [S, V] stands in a row's ids from `first` on."""
    at = torch.arange(adjust.ids.shape[1], device=logits.device)
    counted = (at >= first[:, None]) & (at < adjust.length[:, None])
    return torch.zeros_like(logits).scatter_add_(1, adjust.ids.long(), counted.to(logits.dtype))


def floors(scores: Tensor, rows: SampleRows) -> Tensor:
    """[S, 1] the least score of each row that top-k, top-p and min-p keep; `scores` [S, V] are tempered."""
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
    """[S, V] bool: the tokens that typical-p keeps; `scores` [S, V] are tempered, minus infinity where another filter
    took a token, and `share` [S] is `typical_p`."""
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
    """The outcome, with log-probabilities of the raw logits [S, V] f32 unless `k` is None."""
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
    """[S] int64, one token of each row; `scores` [S, V] are tempered, minus infinity where a filter took a token."""
    count, vocabulary = scores.shape
    blocks = -(-vocabulary // BLOCK)
    best = scores.max(-1, keepdim=True).values
    whole = torch.nn.functional.pad(scores, (0, blocks * BLOCK - vocabulary), value=-torch.inf)
    mass = torch.exp(whole - best).view(count, blocks, BLOCK).sum(-1, dtype=torch.float64)
    block = (mass.log().float() + noise(rows, torch.arange(blocks, device=scores.device), 1)).argmax(-1, keepdim=True)
    tokens = block * BLOCK + torch.arange(BLOCK, device=scores.device)
    place = (whole.gather(1, tokens) + noise(rows, tokens, 0)).argmax(-1, keepdim=True)
    return tokens.gather(1, place)[:, 0].clamp(max=vocabulary - 1)


def noise(rows: SampleRows, index: Tensor, level: int) -> Tensor:
    """Gumbel numbers [S, N] for indices [N] or [S, N]: level 0 of tokens, level 1 of blocks."""
    return gumbel(bits(rows.seed[:, None], rows.choice[:, None], rows.position[:, None], index, level))


def reference(logits: Tensor, rows: SampleRows) -> Sampled:
    """Draw from logits [S, V] of any float type, without waiting for the device; does what every variant must."""
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


def make(context: OpContext) -> Sampler:
    """The reference serves every variant."""
    return reference


def plain_rows(count: int, **columns: float) -> SampleRows:
    """`count` rows that sample from the model's own distribution; `columns` sets others for all of them."""

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
    """Inputs that every kernel must agree on with the reference."""
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
        # one of many tokens, all but a few, and a mask that two rows share
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
    """Rows that need what the variant can do, but for the penalties of `full`."""
    logits = numbers(context, tokens, size(context.shape, "vocab", 1000)) * 4
    variant = context.shape.get("variant")
    columns = {} if variant in ("greedy", "temperature") else {"top_k": 50, "top_p": 0.9}
    rows = plain_rows(tokens, temperature=0.0 if variant == "greedy" else 0.8, **columns)
    yield logits, rows.to(logits.device)


def cost(shape: Shape) -> tuple[float, float]:
    """One pass over the logits; what sorting would take is a kernel's own affair."""
    elements = size(shape, "tokens") * size(shape, "vocab")
    return float(shape.get("element") or 4) * elements, 4.0 * elements
