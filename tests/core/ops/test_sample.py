"""Op `sample`: distributions, filters against brute force, and independence of the batch, for every CPU kernel."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.builtin.cpu import sample as sample_cpu
from llmcore.ops.sample import (
    Adjust,
    Rises,
    Sampler,
    SampleRows,
    adjusted,
    floors,
    plain_rows,
    reference,
    samples,
    typical,
)
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

KERNELS = pytest.mark.parametrize("sampler", [reference, sample_cpu.sample], ids=["reference", "cpu"])


def logits_of(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def positions(rows: SampleRows) -> SampleRows:
    return replace(rows, position=torch.arange(len(rows.position)))


def brute_force(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that may be drawn, one filter after the other, from sorted lists."""
    scored = sorted(((float(s) / temperature, -i) for i, s in enumerate(row)), reverse=True)
    if top_k:
        scored = scored[:top_k]
    weights = [pow(2.718281828459045, s - scored[0][0]) for s, _ in scored]
    total, seen, kept = sum(weights), 0.0, []
    for weight, (_, negative) in zip(weights, scored, strict=True):
        if seen < top_p * total and weight >= min_p:
            kept.append(-negative)
        seen += weight
    return set(kept)


@KERNELS
def test_temperature_zero_takes_the_best(sampler: Sampler) -> None:
    logits = logits_of(6, 500)
    out = sampler(logits, plain_rows(6, temperature=0.0, top_k=3, seed=1))
    assert out.tokens.tolist() == logits.argmax(-1).tolist()
    assert out.tokens.dtype == torch.int32
    assert out.finite.all()


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_the_models_dtype_are_computed_with_in_f32(sampler: Sampler, dtype: torch.dtype) -> None:
    logits = logits_of(64, 700).to(dtype)
    rows = replace(positions(plain_rows(64, temperature=0.8, top_p=0.9, seed=2)), logprobs=3)
    for field, got in vars(sampler(logits, rows)).items():
        assert torch.equal(got, getattr(sampler(logits.float(), rows), field)), field


@KERNELS
def test_draws_follow_the_distribution(sampler: Sampler) -> None:
    logits, draws, temperature = logits_of(1, 12, scale=1.0), 6000, 0.7
    rows = positions(plain_rows(draws, temperature=temperature, seed=11))
    counts = torch.bincount(sampler(logits.expand(draws, -1).contiguous(), rows).tokens.long(), minlength=12)
    expected = torch.softmax(logits[0].double() / temperature, -1) * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # 0.999 quantile of chi-square with 11 degrees of freedom


@KERNELS
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 4, 1.0, 0.0), (0.7, 0, 0.6, 0.0), (1.3, 0, 1.0, 0.2), (0.9, 9, 0.8, 0.0), (2.0, 12, 0.9, 0.1)],
)
def test_filters_keep_what_brute_force_keeps(
    sampler: Sampler, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    draws = 1500
    logits = logits_of(1, 16, seed=3, scale=1.0)
    rows = plain_rows(draws, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=5)
    drawn = sampler(logits.expand(draws, -1).contiguous(), positions(rows)).tokens.tolist()
    allowed = brute_force(logits[0], temperature, top_k, top_p, min_p)
    one = replace(rows, **{f.name: getattr(rows, f.name)[:1] for f in fields(rows)[:7]})
    tempered = logits / temperature
    assert set(torch.nonzero(tempered[0] >= floors(tempered, one)[0]).flatten().tolist()) == allowed
    assert set(drawn) <= allowed
    assert len(set(drawn)) == len(allowed)


def transformers_keeps(logits: torch.Tensor, columns: dict[str, float]) -> set[int]:
    """The ids that may be drawn from logits [V], by transformers' own warpers in its order."""
    scores = TemperatureLogitsWarper(columns["temperature"])(None, logits[None])
    if "top_k" in columns:
        scores = TopKLogitsWarper(int(columns["top_k"]))(None, scores)
    if "top_p" in columns:
        scores = TopPLogitsWarper(columns["top_p"])(None, scores)
    if "min_p" in columns:
        scores = MinPLogitsWarper(columns["min_p"])(None, scores)
    scores = TypicalLogitsWarper(mass=columns["typical_p"])(None, scores)
    return set(torch.nonzero(scores[0] > -torch.inf).flatten().tolist())


@KERNELS
@pytest.mark.parametrize(
    "columns",
    [
        {"temperature": 1.0, "typical_p": 0.95},
        {"temperature": 0.7, "typical_p": 0.2},
        {"temperature": 1.0, "typical_p": 1e-6},
        {"temperature": 1.5, "typical_p": 0.5, "top_k": 9},
        {"temperature": 1.0, "typical_p": 0.9, "top_p": 0.8},
        {"temperature": 1.2, "typical_p": 0.6, "min_p": 0.1},
        {"temperature": 0.8, "typical_p": 0.7, "top_k": 12, "top_p": 0.95, "min_p": 0.01},
    ],
)
@pytest.mark.parametrize("seed", [3, 4])
def test_typical_p_keeps_what_transformers_keeps(sampler: Sampler, columns: dict[str, float], seed: int) -> None:
    draws = 3000
    logits = logits_of(1, 16, seed=seed, scale=1.0)
    rows = positions(plain_rows(draws, seed=5, **columns))
    drawn = sampler(logits.expand(draws, -1).contiguous(), rows).tokens.tolist()
    assert set(drawn) == transformers_keeps(logits[0], columns)


def test_typical_p_of_a_large_vocabulary_and_of_equal_scores() -> None:
    logits = logits_of(6, 5000, seed=8)
    logits[1] = (logits[1] * 2).round() / 2
    logits[2] = 0.25
    logits[3, ::2] = -torch.inf
    logits[4, 17] = 40.0
    logits[5] *= 20
    for share in (0.05, 0.5, 0.95):
        kept = typical(logits, torch.full((6,), share))
        for row in range(6):
            mine = kept[row] & (logits[row] > -torch.inf)
            expected = transformers_keeps(logits[row], {"temperature": 1.0, "typical_p": share})
            assert set(torch.nonzero(mine).flatten().tolist()) == expected, (row, share)
    assert typical(logits, torch.ones(6)).all()


def test_typical_p_can_leave_the_best_token_out() -> None:
    """One likely token beside many: the most typical ones are of the many."""
    logits = torch.zeros(1, 400)
    logits[0, 7] = 5.0
    kept = typical(logits, torch.tensor([0.5]))
    assert not kept[0, 7] and kept.sum() == 399
    out = sample_cpu.sample(logits.expand(50, -1), positions(plain_rows(50, typical_p=0.5)))
    assert 7 not in out.tokens.tolist()


def test_the_kernels_draw_the_same_tokens() -> None:
    context = OpContext(op="sample", device=DeviceInfo("cpu"), dtype="f32", shape={"variant": "full", "vocab": 3000})
    for logits, rows in samples(context):
        for k in (None, 3):
            mine, theirs = (sampler(logits, replace(rows, logprobs=k)) for sampler in (sample_cpu.sample, reference))
            for field in fields(mine):
                a, b = getattr(mine, field.name), getattr(theirs, field.name)
                assert (a is None and b is None) or torch.equal(a, b), field.name


@KERNELS
def test_a_row_does_not_see_its_batch(sampler: Sampler) -> None:
    logits = logits_of(9, 700)
    rows = replace(
        positions(plain_rows(9, seed=77)),
        temperature=torch.tensor([0.0, 1.0, 0.5] * 3),
        top_k=torch.tensor([0, 40, 7] * 3, dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.9, 0.5, 0.9, 1.0, 0.3, 0.2, 1.0, 0.99]),
        choice=torch.arange(9),
        typical_p=torch.tensor([0.5, 1.0, 1.0, 0.9, 0.2, 1.0, 0.95, 1.0, 0.7]),
    )
    together = sampler(logits, rows).tokens.tolist()
    for i in range(9):
        alone = replace(rows, **{f.name: getattr(rows, f.name)[i : i + 1] for f in fields(rows)[:8]})
        assert sampler(logits[i : i + 1], alone).tokens.tolist() == [together[i]]


@KERNELS
def test_rows_that_are_not_finite_are_named(sampler: Sampler) -> None:
    logits = logits_of(5, 64)
    logits[1, 7], logits[2, 0], logits[3, 63] = torch.nan, torch.inf, -torch.inf
    out = sampler(logits, plain_rows(5, seed=4))
    assert out.finite.tolist() == [True, False, False, False, True]
    clean = logits_of(5, 64)
    assert out.tokens[[0, 4]].tolist() == sampler(clean, plain_rows(5, seed=4)).tokens[[0, 4]].tolist()


def adjust_of(ids: list[list[int]], **changes: torch.Tensor) -> Adjust:
    count = len(ids)
    length = max(len(row) for row in ids)
    plain = Adjust(
        ids=torch.tensor([row + [0] * (length - len(row)) for row in ids], dtype=torch.int32),
        length=torch.tensor([len(row) for row in ids]),
        repetition=torch.ones(count),
        presence=torch.zeros(count),
        frequency=torch.zeros(count),
        repeat_from=torch.zeros(count, dtype=torch.int32),
        count_from=torch.zeros(count, dtype=torch.int32),
        bias_row=torch.zeros(0, dtype=torch.int64),
        bias_token=torch.zeros(0, dtype=torch.int64),
        bias_value=torch.zeros(0),
        bias_until=torch.zeros(0, dtype=torch.int64),
    )
    return replace(plain, **changes)


@KERNELS
def test_penalties_count_from_where_the_row_says(sampler: Sampler) -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 0.0]]).repeat(4, 1)
    adjust = adjust_of(
        [[0, 2], [0, 2], [0, 0, 1], [0, 0, 1]],
        repetition=torch.tensor([1.1, 1.1, 1.0, 1.0]),
        repeat_from=torch.tensor([0, 1, 0, 0]),
        frequency=torch.tensor([0.0, 0.0, 0.3, 0.3]),
        count_from=torch.tensor([0, 0, 0, 3]),
    )
    out = sampler(logits, replace(plain_rows(4, temperature=0.0), adjust=adjust, logprobs=1))
    assert out.tokens.tolist() == [1, 0, 1, 0]
    assert out.logprobs is not None
    assert torch.allclose(out.logprobs, torch.log_softmax(logits, -1).gather(1, out.tokens[:, None].long())[:, 0])


@KERNELS
def test_scores_rise_with_the_answers_length_after_penalties_and_before_biases(sampler: Sampler) -> None:
    logits = torch.tensor([[3.1, 2.0, -1.0]]).repeat(6, 1)
    entries = {
        "row": torch.arange(6),
        "token": torch.tensor([1, 1, 1, 2, 1, 1]),
        "start": torch.tensor([2] * 6, dtype=torch.int32),
        "rate": torch.full((6,), math.log(1.5)),
    }
    adjust = adjust_of(
        [[0]] * 6,
        repetition=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 2.0]),
        bias_row=torch.tensor([4]),
        bias_token=torch.tensor([1]),
        bias_value=torch.tensor([-torch.inf]),
        bias_until=torch.tensor([100]),
        rises=Rises(**entries),
    )
    position = torch.tensor([2, 3, 4, 90, 90, 2])
    rows = replace(plain_rows(6, temperature=0.0), position=position, adjust=adjust)
    scores = adjusted(logits, rows, adjust)
    # a negative score rises too
    assert sampler(logits, rows).tokens.tolist() == [0, 0, 1, 2, 0, 1]
    assert scores[:3, 1].tolist() == pytest.approx([2.0, 3.0, 4.5])
    assert scores[3, 2] > 1e14
    assert scores[4, 1] == -torch.inf
    assert scores[5].tolist() == pytest.approx([1.55, 2.0, -1.0])
    assert sampler(logits, replace(rows, position=torch.tensor([1 << 30] * 6))).tokens[0] == 1


@KERNELS
def test_biases_last_until_their_position(sampler: Sampler) -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0]]).repeat(3, 1)
    adjust = adjust_of(
        [[0]] * 3,
        bias_row=torch.tensor([0, 1, 2, 2]),
        bias_token=torch.tensor([2, 2, 2, 0]),
        bias_value=torch.tensor([-torch.inf, -torch.inf, -6.0, 3.0]),
        bias_until=torch.tensor([4, 4, 1 << 30, 1 << 30]),
    )
    rows = replace(plain_rows(3, temperature=0.0), position=torch.tensor([3, 4, 9]), adjust=adjust)
    assert sampler(logits, rows).tokens.tolist() == [1, 2, 0]


@KERNELS
def test_logprobs_are_those_of_the_raw_logits(sampler: Sampler) -> None:
    logits = logits_of(2, 50)
    out = sampler(logits, replace(plain_rows(2, temperature=0.3, top_k=2, seed=1), logprobs=5))
    expected = torch.log_softmax(logits, -1)
    assert out.logprobs is not None and out.top_logprobs is not None and out.top_ids is not None
    assert torch.allclose(out.logprobs, expected.gather(1, out.tokens[:, None].long())[:, 0], atol=1e-5)
    assert torch.allclose(out.top_logprobs, expected.topk(5).values, atol=1e-5)
    assert out.top_ids.tolist() == expected.topk(5).indices.tolist()
