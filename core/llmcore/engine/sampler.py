"""From logits to tokens: which draw a step needs, the columns that it reads, and the scores of a model that scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcore.api.bridge import LengthDecay, SamplingParams
from llmcore.api.protocols import Int32
from llmcore.api.specs import bucket_of
from llmcore.engine.upload import Tables, Upload
from llmcore.ops.sample import VARIANTS, Adjust, Masks, Rises, Sampled, Sampler, SampleRows, plain_rows
from llmcore.sched.plan import Admitted, StepPlan
from llmcore.sched.processors import Steered, both_masks, mask_of

_GREEDY, _TEMPERATURE, _FILTERED, _FULL = range(len(VARIANTS))
_NARROWEST = 1024
_FOREVER = np.int32((1 << 31) - 1)


@dataclass(frozen=True)
class Draw:
    """The host's choices for the draw of one step. A captured draw serves every step with equal ones."""

    variant: int
    """Index into VARIANTS."""
    logprobs: int = -1
    """The number of best tokens to report, -1 for no log-probabilities."""
    width: int = 0
    """Columns of the history that penalties look at, 0 if no row has penalties or biases."""
    biases: int = 0
    """The number of biased scores."""
    masks: int = 0
    """Room for masks: a power of two, or 0."""
    rises: int = 0
    """The number of scores that rise with the answer's length."""
    typical: bool = False
    """A row asks for typical-p."""

    @property
    def lasting(self) -> bool:
        """True if steps with equal choices come often enough to be captured, and their columns are few."""
        return not (self.biases or self.masks or self.rises)


@dataclass(frozen=True)
class _Changes:
    """Changes of a request's scores, a column for each field: of which `token`, by which `value`. `at`: the number of
    produced tokens up to which a bias lasts, or from which on a score rises."""

    token: Int32
    value: NDArray[np.float32]
    at: Int32

    def without_bans(self) -> _Changes:
        """Biases without bans of a short answer's ends, for a mask that allows only these tokens: the mask wins."""
        lasting = self.at == _FOREVER
        return _Changes(self.token[lasting], self.value[lasting], self.at[lasting])


Kept = TypeVar("Kept")


class RowSampler:
    """Draws the next token of each sampled row. `samplers`: variant -> one callable per token bucket. `vocab_size`:
    of the logits. `own`: like `samplers`, for the variants that ranks draw from their own logits.

    The host keeps, per request index, what decides the shape of a step: its variant, its log-probabilities and its
    biases. Everything else is a column on the device.
    """

    def __init__(
        self,
        tables: Tables,
        samplers: Mapping[str, Sequence[Sampler]],
        vocab_size: int,
        own: Mapping[str, Sequence[Sampler]],
    ) -> None:
        self._tables = tables
        self._samplers = samplers
        self._own = own
        self._vocab_size = vocab_size
        size = tables.lengths.shape[0]
        self._variant = np.zeros(size, np.uint8)
        self._adjusts = np.zeros(size, np.bool_)
        self._typical = np.zeros(size, np.bool_)
        self._logprobs = np.full(size, -1, np.int32)
        self._longest = np.zeros(size, np.int32)
        self._biases: dict[int, _Changes] = {}
        self._rises: dict[int, _Changes] = {}
        self._allowed: dict[int, Int32] = {}
        self._greedy: dict[int, SampleRows] = {}

    def admit(self, plan: StepPlan) -> None:
        """Host: note what was admitted and what will be drawn."""
        for admitted in plan.admitted:
            self._admit(admitted)
        if plan.sample_request.size:
            self._longest[plan.sample_request] += 1

    def pack(self, plan: StepPlan, upload: Upload, rows: int, ready: Sequence[Steered] = ()) -> Draw:
        """Host: what kind of draw the step needs; puts biases, masks and rises of the sampled rows.

        `rows`: sampled ones with padding. `ready`: those whose logits processors have said what they want.
        """
        indices = plan.sample_request
        variant = int(self._variant[indices].max(initial=_GREEDY))
        if variant < _FULL:
            return Draw(variant)
        biases, rises = _of_rows(self._biases, indices), _of_rows(self._rises, indices)
        if biases and (ending := {s for s, b in ready if b.must_end}):
            biases = [(s, bias.without_bans() if s in ending else bias) for s, bias in biases]
        biases += [(s, _added(b.bias)) for s, b in ready if b.bias]
        masks = _put_masks(self._masked(indices, ready), rows, upload)
        n_rises, n_biases = _put_changes("rise", rises, upload), _put_changes("bias", biases, upload)
        width = 0
        if biases or rises or self._adjusts[indices].any():
            # A power of two, so that a captured draw serves many steps.
            longest = max(int(self._longest[indices].max()), _NARROWEST)
            width = min(1 << (longest - 1).bit_length(), self._tables.max_len)
        asked = int(self._logprobs[indices].max())
        typical = bool(self._typical[indices].any())
        return Draw(variant, asked, width, n_biases, masks, n_rises, typical)

    def reads_own(self, draw: Draw) -> bool:
        """True if the ranks draw together, each from its own logits."""
        return VARIANTS[draw.variant] in self._own

    def draw(self, logits: Tensor, request: Tensor, draw: Draw, upload: Upload, *, own: bool = False) -> Sampled:
        """Device: sample a token from each row of `logits` [S, V], for the requests `request` [S] int64.

        `own`: the logits are this rank's own, [S, N], and every rank draws now.
        """
        count = request.shape[0]
        sample = (self._own if own else self._samplers)[VARIANTS[draw.variant]][bucket_of(count)]
        if draw.variant == _GREEDY:
            return sample(logits, self._greedy_rows(count))
        floats, ints = self._tables.floats[:, request].unbind(0), self._tables.ints[:, request].unbind(0)
        temperature, top_p, min_p, typical_p, *penalties = floats
        top_k, choice, repeat_from, count_from, low, high = ints
        length = self._tables.lengths[request]
        adjust = None
        if draw.width:
            ids = self._tables.history[:, : draw.width].index_select(0, request)
            adjust = _adjust(ids, length, penalties, (repeat_from, count_from), draw, upload)
        masks = Masks(words=upload.get("masks").view(draw.masks, -1), of=upload.get("mask_of")) if draw.masks else None
        rows = SampleRows(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=(high.long() << 32) | (low.long() & 0xFFFFFFFF),
            choice=choice.long(),
            position=(length - self._tables.prompt_len[request]).long(),
            typical_p=typical_p if draw.typical else None,
            adjust=adjust,
            masks=masks,
            logprobs=draw.logprobs if draw.logprobs >= 0 else None,
        )
        return sample(logits, rows)

    def _masked(self, indices: Int32, ready: Sequence[Steered]) -> list[tuple[int, Int32]]:
        """The masks of sampled rows, by their number."""
        masks = {s: b.mask for s, b in ready if b.mask is not None}
        for s, allowed in _of_rows(self._allowed, indices):
            mask = both_masks(allowed, masks.get(s))
            # If no token is left, the processor's mask wins: without it the output would be malformed.
            masks[s] = mask if mask.any() else masks[s]
        return list(masks.items())

    def _greedy_rows(self, count: int) -> SampleRows:
        """Rows of greedy requests: they need no column of the device."""
        if count not in self._greedy:
            self._greedy[count] = plain_rows(count, temperature=0.0).to(self._tables.lengths.device)
        return self._greedy[count]

    def _admit(self, admitted: Admitted) -> None:
        index, sampling = admitted.index, admitted.sampling
        self._longest[index] = len(admitted.tokens)
        self._logprobs[index] = -1 if sampling.logprobs is None else sampling.logprobs
        for kept in (self._biases, self._rises, self._allowed):
            kept.pop(index, None)
        if sampling.allowed_ids:
            self._allowed[index] = mask_of(sampling.allowed_ids, self._vocab_size)
        if sampling.length_decay is not None:
            self._rises[index] = _risen(sampling.length_decay)
        self._typical[index] = _typical(sampling)
        bias = _bias(admitted)
        if bias is not None:
            self._biases[index] = bias
        self._adjusts[index] = bias is not None or _penalized(sampling)
        full = self._adjusts[index] or admitted.masked
        self._variant[index] = _FULL if full else variant_of(sampling)


def variant_of(sampling: SamplingParams) -> int:
    """Index into VARIANTS of the least variant that serves `sampling`."""
    changed = _penalized(sampling) or sampling.logit_bias or sampling.allowed_ids or sampling.length_decay is not None
    if changed or sampling.logprobs is not None or _typical(sampling):
        return _FULL
    if sampling.greedy:
        return _GREEDY
    if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0:
        return _FILTERED
    return _TEMPERATURE


def _penalized(sampling: SamplingParams) -> bool:
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def _typical(sampling: SamplingParams) -> bool:
    return sampling.typical_p < 1.0 and not sampling.greedy


def _of_rows(kept: Mapping[int, Kept], indices: Int32) -> list[tuple[int, Kept]]:
    """By number, the sampled rows whose requests have something in `kept`."""
    return [(s, kept[i]) for s, i in enumerate(indices.tolist()) if i in kept] if kept else []


def _bias(admitted: Admitted) -> _Changes | None:
    masked = admitted.stop_ids if admitted.min_new_tokens > 0 else ()
    chosen = admitted.sampling.logit_bias
    if not masked and not chosen:
        return None
    return _Changes(
        token=np.array([*chosen, *masked], np.int32),
        value=np.array([*chosen.values(), *(-np.inf for _ in masked)], np.float32),
        at=np.array([_FOREVER] * len(chosen) + [admitted.min_new_tokens] * len(masked), np.int32),
    )


def _added(bias: Mapping[int, float]) -> _Changes:
    """The bias that a logits processor adds to the next token's scores."""
    token, value = np.array([*bias], np.int32), np.array([*bias.values()], np.float32)
    return _Changes(token, value, np.full(token.size, _FOREVER, np.int32))


def _risen(decay: LengthDecay) -> _Changes:
    token = np.array(decay.ids, np.int32)
    rate = np.full(token.size, math.log(decay.factor), np.float32)
    return _Changes(token, rate, np.full(token.size, decay.start, np.int32))


def _put_changes(kind: str, changes: Sequence[tuple[int, _Changes]], upload: Upload) -> int:
    """Put changes by sampled row, and say how many scores they change."""
    if changes:
        of = np.repeat(np.array([s for s, _ in changes], np.int32), [change.token.size for _, change in changes])
        upload.put(f"{kind}_row", of)
        upload.put(f"{kind}_token", np.concatenate([change.token for _, change in changes]))
        upload.put(f"{kind}_value", np.concatenate([change.value for _, change in changes]).view(np.int32))
        upload.put(f"{kind}_at", np.concatenate([change.at for _, change in changes]))
    return sum(change.token.size for _, change in changes)


def _put_masks(masks: Sequence[tuple[int, Int32]], rows: int, upload: Upload) -> int:
    """Put masks by sampled row, and say for how many there is room: few sizes, so that a captured draw serves many."""
    if not masks:
        return 0
    room = 1 << (len(masks) - 1).bit_length()
    of = np.full(rows, -1, np.int32)
    of[[s for s, _ in masks]] = np.arange(len(masks), dtype=np.int32)
    upload.put("mask_of", of)
    filling = [np.zeros_like(masks[0][1])] * (room - len(masks))
    upload.put("masks", np.concatenate([*(words for _, words in masks), *filling]))
    return room


def _adjust(
    ids: Tensor, length: Tensor, penalties: Sequence[Tensor], first: tuple[Tensor, Tensor], draw: Draw, upload: Upload
) -> Adjust:
    none = ids.new_empty(0)
    get, floats = upload.get, torch.float32
    rises = None
    if draw.rises:
        rises = Rises(
            row=get("rise_row").long(),
            token=get("rise_token").long(),
            start=get("rise_at"),
            rate=get("rise_value").view(floats),
        )
    return Adjust(
        ids=ids,
        length=length,
        repetition=penalties[0],
        presence=penalties[1],
        frequency=penalties[2],
        repeat_from=first[0],
        count_from=first[1],
        bias_row=(get("bias_row") if draw.biases else none).long(),
        bias_token=(get("bias_token") if draw.biases else none).long(),
        bias_value=(get("bias_value") if draw.biases else none).view(floats),
        bias_until=get("bias_at") if draw.biases else none,
        rises=rises,
    )


@dataclass(frozen=True, kw_only=True)
class Scored(Sampled):
    """`scores` [S, n] f32; every token is 0 and ends its request."""

    scores: Tensor


class RowScorer(RowSampler):
    """In place of a RowSampler."""

    def admit(self, plan: StepPlan) -> None:
        """Nothing to note."""

    def pack(self, plan: StepPlan, upload: Upload, rows: int, ready: Sequence[Any] = ()) -> Draw:
        """Every step is alike."""
        return Draw(0)

    def draw(self, logits: Tensor, request: Tensor, draw: Draw, upload: Upload, *, own: bool = False) -> Scored:
        """logits [S, n] as they are."""
        scores = logits.float()
        tokens = torch.zeros(len(scores), dtype=torch.int32, device=scores.device)
        return Scored(tokens=tokens, finite=scores.isfinite().all(1), scores=scores)
