"""Op `sample` in Triton's interpreter: the tokens of the torch reference, row by row, in every variant."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import import_module
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import DTYPES
from llmcore.ops import sample as op
from llmcore.ops.sample import Adjust, Sampler, SampleRows, plain_rows, reference
from llmcore_devtools.kernels.compare import check
from llmcore_triton.sample import floors as floors_module
from llmcore_triton.sample import typical as typical_module
from llmcore_triton.sample.adjust import adjusted
from llmcore_triton.sample.numbers import gumbel
from llmcore_triton.sample.peaks import peaks

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
DTYPE = pytest.mark.parametrize("dtype", ["f32", "f16"])


def sampler(variant: str, vocab: int, dtype: str = "f32", bucket: int = 1) -> Sampler:
    made: Sampler = import_module(f"llmcore_triton.sample.{variant}").make(context(variant, vocab, dtype, bucket))
    return made


def context(variant: str, vocab: int, dtype: str = "f32", bucket: int = 1) -> OpContext:
    shape = {"variant": variant, "vocab": vocab}
    return OpContext(op="sample", device=H200, dtype=dtype, shape=shape, bucket=bucket)  # type: ignore[arg-type]


def logits_of(rows: int, vocab: int, dtype: str = "f32", seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.to(DTYPES[dtype])


def rows_of(count: int, seed: int = 0, **columns: float) -> SampleRows:
    """Rows of different seeds, choices and positions, far from the sizes of small integers."""
    g = torch.Generator().manual_seed(seed)
    return replace(
        plain_rows(count, **columns),
        seed=torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=g),
        choice=torch.randint(0, 1 << 31, (count,), generator=g),
        position=torch.randint(0, 1 << 20, (count,), generator=g),
    )


def mixed(count: int, seed: int = 0) -> SampleRows:
    """Rows of every kind side by side: greedy, plain, each filter, all of them, and filters that keep everything."""
    kinds = [
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
        {},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"top_p": 0.0},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
        {"top_k": 1 << 30, "top_p": 0.999},
        {"top_k": 700, "temperature": 3.0},
        {"temperature": 0.3, "top_p": 0.95},
        {"temperature": 100.0, "top_p": 0.5},
    ]
    rows = rows_of(count, seed)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        column = getattr(rows, name).clone()
        for i in range(count):
            value = kinds[i % len(kinds)].get(name)
            if value is not None:
                column[i] = value
        rows = replace(rows, **{name: column})
    return rows


def same(sample: Sampler, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """Returns the tokens, which are the reference's wherever there are some to draw."""
    got, expected = sample(logits, rows), reference(logits, rows)
    assert got.finite.dtype == torch.bool and got.tokens.dtype == torch.int32
    assert got.finite.tolist() == expected.finite.tolist()
    assert got.tokens[expected.finite].tolist() == expected.tokens[expected.finite].tolist()
    assert bool(((got.tokens >= 0) & (got.tokens < logits.shape[1])).all())
    return got.tokens


@DTYPE
@pytest.mark.parametrize("variant", op.VARIANTS)
def test_the_ops_own_samples(variant: str, dtype: str) -> None:
    where = context(variant, 1000, dtype)
    assert check(op, sampler(variant, 1000, dtype), where) > 0


@DTYPE
@pytest.mark.parametrize(("bucket", "vocab"), [(0, 5000), (1, 1024), (4, 17), (1, 8193)])
def test_greedy_takes_the_first_of_the_best(dtype: str, bucket: int, vocab: int) -> None:
    logits = logits_of(6, vocab, dtype)
    logits[0, [3, vocab // 2, vocab - 1]] = 60.0
    logits[1, vocab - 1] = 60.0
    logits[2] = -1.0
    logits[3, 5], logits[4, vocab - 1], logits[5, 0] = torch.nan, torch.inf, -torch.inf
    wide = torch.full((6, vocab + 7), torch.nan, dtype=logits.dtype)
    wide[:, :vocab] = logits
    for given in (logits, wide[:, :vocab]):
        same(sampler("greedy", vocab, dtype, bucket), given, plain_rows(6, temperature=0.0))


@triton.jit
def _noise(seed, choice, position, out, SIZE: tl.constexpr, LEVEL: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0), tl.arange(0, SIZE)
    words = gumbel(tl.load(seed + row), tl.load(choice + row), tl.load(position + row), at, LEVEL)
    tl.store(out + row * SIZE + at, words)


@pytest.mark.parametrize("level", [0, 1])
def test_random_numbers_are_those_of_the_reference(level: int) -> None:
    rows = rows_of(4, seed=9)
    out = torch.full((4, 4096), torch.nan)
    _noise[(4,)](rows.seed, rows.choice, rows.position, out, SIZE=4096, LEVEL=level)
    # the logarithms of torch and of numpy differ in the last bit
    torch.testing.assert_close(out, op.noise(rows, torch.arange(4096), level), rtol=1e-6, atol=1e-6)


@DTYPE
@pytest.mark.parametrize(("vocab", "count"), [(100, 30), (1024, 30), (9000, 8)])
def test_draws_from_everything(dtype: str, vocab: int, count: int) -> None:
    logits = logits_of(1, vocab, dtype).expand(count, -1).contiguous()
    rows = rows_of(count, vocab, temperature=0.9)
    rows.temperature[::7] = 0.0
    same(sampler("temperature", vocab, dtype), logits, rows)


@pytest.mark.parametrize(("dtype", "vocab", "seed"), [("f32", 3000, 0), ("f16", 1000, 1), ("f16", 5000, 2)])
def test_filters(dtype: str, vocab: int, seed: int) -> None:
    same(sampler("filtered", vocab, dtype), logits_of(13, vocab, dtype, seed), mixed(13, seed))


@DTYPE
@pytest.mark.parametrize("candidates", [None, 32])
def test_floors_are_those_of_a_sorted_row(dtype: str, candidates: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the candidates are too many to be gathered, where many are equal, and far from a normal shape."""
    if candidates:
        monkeypatch.setattr(floors_module, "CANDIDATES", candidates)
    vocab = 600
    logits = logits_of(39, vocab, dtype, seed=4)
    logits[13:26] = (logits[13:26] / 2).round()
    logits[26:32] = logits[26:32] * 0.01
    logits[32:34] = 0.0
    logits[34:36] = -logits[34:36].abs() * 100
    logits[36:39, ::2] = -0.0
    rows = mixed(39)
    got = floors_module.floors(logits, peaks(logits, False), rows, False)
    tempered = logits.float() / torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    hot = rows.temperature > 0
    kept, expected = tempered >= got[:, None], tempered >= op.floors(tempered, rows)
    assert torch.equal(kept[hot], expected[hot])


@pytest.mark.parametrize("variant", ["temperature", "filtered", "full"])
def test_rows_that_are_not_finite_are_named_and_get_some_token(variant: str) -> None:
    logits = logits_of(14, 1000)
    logits[1, 7], logits[2, 0], logits[3, 999], logits[4, 500] = torch.nan, torch.inf, -torch.inf, torch.nan
    logits[5], logits[6], logits[7] = torch.nan, torch.inf, -torch.inf
    rows = rows_of(14) if variant == "temperature" else mixed(14)
    same(sampler(variant, 1000), logits, rows)


@pytest.mark.parametrize("variant", ["filtered", "full"])
def test_a_row_draws_the_same_in_every_variant_and_batch(variant: str) -> None:
    logits, rows = logits_of(6, 5000), rows_of(6, temperature=0.8)
    alone = sampler("temperature", 5000)(logits, rows).tokens
    together = mixed(13)
    together = replace(
        together, **{f.name: torch.cat([getattr(together, f.name), getattr(rows, f.name)]) for f in fields(rows)[:7]}
    )
    wide = torch.cat([logits_of(13, 5000, seed=8), logits])
    assert sampler(variant, 5000)(wide, together).tokens[13:].tolist() == alone.tolist()


def adjust_of(count: int, vocab: int, longest: int, biases: int) -> Adjust:
    """Random histories with few distinct tokens; what lies behind a row's length is not of the vocabulary."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, min(vocab, 20), (count, longest), generator=g, dtype=torch.int32)
    length = torch.randint(0, longest + 1, (count,), generator=g)

    def up_to(most: torch.Tensor) -> torch.Tensor:
        return (torch.rand(count, generator=g) * (most + 1)).int()

    return Adjust(
        ids=ids,
        length=length.int(),
        repetition=0.5 + torch.rand(count, generator=g),
        presence=torch.randn(count, generator=g),
        frequency=torch.randn(count, generator=g) * 0.3,
        repeat_from=up_to(length),
        count_from=up_to(length),
        bias_row=torch.randint(0, count, (biases,), generator=g),
        bias_token=torch.randperm(vocab, generator=g)[:biases],
        bias_value=torch.where(torch.arange(biases) % 3 == 0, -torch.inf, torch.randn(biases, generator=g) * 5),
        bias_until=torch.randint(0, 1 << 20, (biases,), generator=g, dtype=torch.int32),
    )


def with_shares(rows: SampleRows, seed: int = 0) -> SampleRows:
    """The same rows, of which two in three ask for typical-p."""
    shares = torch.rand(len(rows.seed), generator=torch.Generator().manual_seed(seed))
    shares[::3] = 1.0
    return replace(rows, typical_p=shares)


@pytest.mark.parametrize(("dtype", "candidates"), [("f32", None), ("f16", 32)])
def test_typical_p_keeps_what_a_sorted_row_keeps(
    dtype: str, candidates: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the candidates are too many to be gathered, where many are equal, and far from a normal shape."""
    if candidates:
        monkeypatch.setattr(typical_module, "CANDIDATES", candidates)
    vocab = 600
    logits = logits_of(39, vocab, dtype, seed=5)
    logits[13:26] = (logits[13:26] / 2).round()
    logits[26:32] = logits[26:32] * 0.01
    logits[32:34] = 0.0
    logits[34:36] = -logits[34:36].abs() * 100
    logits[36:39, 5] = 12.0
    rows = with_shares(mixed(39))
    rows.typical_p[::5] = 1e-6
    found = peaks(logits, False)
    floors = floors_module.floors(logits, found, rows, False)
    least, most = typical_module.typical(logits, found, floors, rows, False)
    hot = rows.temperature > 0
    tempered = logits.float() / torch.where(hot, rows.temperature, 1.0)[:, None]
    before = tempered.masked_fill(tempered < op.floors(tempered, rows), -torch.inf)
    expected = op.typical(before, rows.typical_p) & (before > -torch.inf)
    got = (tempered >= least[:, None]) & (tempered <= most[:, None])
    assert torch.equal(got[hot], expected[hot])
    assert torch.equal(least[~hot], floors[~hot]) and bool((most[~hot] == torch.inf).all())


@pytest.mark.parametrize(("dtype", "vocab", "masked"), [("f32", 4097, True), ("f16", 1000, False)])
def test_typical_p_beside_every_other_way_to_draw(dtype: str, vocab: int, masked: bool) -> None:
    """The same rows without typical-p draw what they draw without it in their batch."""
    count = 18
    logits, rows = logits_of(count, vocab, dtype, seed=6), with_shares(mixed(count))
    if masked:
        rows = replace(rows, masks=masks_of(count, vocab), adjust=adjust_of(count, vocab, 7, 9))
    logits[3, 7], logits[4, 8] = torch.nan, torch.inf
    tokens = same(sampler("full", vocab, dtype), logits, rows)
    plain = sampler("full", vocab, dtype)(logits, replace(rows, typical_p=None)).tokens
    assert torch.equal(tokens[::3], plain[::3])


@DTYPE
@pytest.mark.parametrize(("vocab", "longest", "biases"), [(1000, 37, 0), (3000, 1100, 50), (100, 0, 5)])
def test_penalties_and_biases(dtype: str, vocab: int, longest: int, biases: int) -> None:
    count = 13
    logits, adjust = logits_of(count, vocab, dtype), adjust_of(count, vocab, longest, biases)
    rows = replace(mixed(count), adjust=adjust)
    behind = torch.arange(longest) >= adjust.length[:, None]
    poisoned = replace(adjust, ids=adjust.ids.masked_fill(behind, 1 << 30))
    got = adjusted(logits, poisoned, rows.position, False)
    assert torch.equal(got, op.adjusted(logits.float(), rows, adjust))
    expected = reference(logits, rows)
    assert sampler("full", vocab, dtype)(logits, replace(rows, adjust=poisoned)).tokens.equal(expected.tokens)


@DTYPE
@pytest.mark.parametrize("number", [1, 7, 2000])
def test_scores_that_rise_with_the_length(dtype: str, number: int) -> None:
    count, vocab, g = 13, 1000, torch.Generator().manual_seed(3)
    logits = logits_of(count, vocab, dtype)
    place = torch.randperm(count * vocab, generator=g)[:number]
    rises = op.Rises(
        row=place // vocab,
        token=place % vocab,
        start=torch.randint(0, 40, (number,), generator=g, dtype=torch.int32),
        rate=torch.rand(number, generator=g) * 4,
    )
    rows = replace(mixed(count), position=torch.arange(0, 5 * count, 5))
    adjust = replace(adjust_of(count, vocab, 37, 50), rises=rises)
    got = adjusted(logits, adjust, rows.position, False)
    torch.testing.assert_close(got, op.adjusted(logits.float(), rows, adjust), rtol=1e-5, atol=1e-5)
    rows = replace(rows, adjust=adjust)
    assert sampler("full", vocab, dtype)(logits, rows).tokens.equal(reference(logits, rows).tokens)


@pytest.mark.parametrize(("dtype", "k"), [("f32", None), ("f16", 0), ("f32", 1), ("f16", 5)])
def test_log_probabilities_are_those_of_the_raw_logits(dtype: str, k: int | None) -> None:
    logits = logits_of(13, 5000, dtype)
    rows = replace(mixed(13), adjust=adjust_of(13, 5000, 9, 9), logprobs=k)
    got, expected = sampler("full", 5000, dtype)(logits, rows), reference(logits, rows)
    assert torch.equal(got.tokens, expected.tokens)
    for name in ("logprobs", "top_ids", "top_logprobs"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert (mine is None) == (theirs is None) == (k is None)
        if mine is not None and name != "top_ids":
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    if got.top_ids is not None and got.top_logprobs is not None:
        assert got.top_ids.dtype == torch.int32
        # equal logits may come in any order
        best = torch.log_softmax(logits.float(), -1).gather(1, got.top_ids.long())
        torch.testing.assert_close(got.top_logprobs, best, rtol=1e-5, atol=1e-5)


def masks_of(count: int, vocab: int) -> op.Masks:
    """A mask for three of four rows: one token, some tokens, all but one; and one that nobody has and is no mask."""
    g = torch.Generator().manual_seed(vocab)
    words = torch.zeros(4, -(-vocab // 32), dtype=torch.int32)
    words[0, (vocab - 1) // 32] = torch.tensor(1 << (vocab - 1) % 32).int()
    words[1] = torch.randint(-(1 << 31), (1 << 31) - 1, words.shape[1:], generator=g, dtype=torch.int64).int()
    words[2] = -1
    words[2, 0] = ~1
    return op.Masks(words=words, of=torch.arange(count, dtype=torch.int32) % 4 - 1)


@pytest.mark.parametrize(("dtype", "vocab", "biases"), [("f32", 9001, 40), ("f16", 31, None), ("f16", 1024, None)])
def test_masks_leave_what_they_allow(dtype: str, vocab: int, biases: int | None) -> None:
    """Also where nothing is left of a whole chunk, and behind a wide row."""
    count = 13
    masks = masks_of(count, vocab)
    rows = replace(mixed(count), masks=masks)
    if biases is not None:
        rows = replace(rows, adjust=adjust_of(count, vocab, 7, biases))
    logits = logits_of(count, vocab, dtype)
    wide = torch.full((count, vocab + 5), torch.nan, dtype=logits.dtype)
    wide[:, :vocab] = logits
    tokens = same(sampler("full", vocab, dtype), wide[:, :vocab], rows)
    assert reference(logits, rows).tokens[1::4].tolist() == [vocab - 1] * 3
    expected = reference(logits, replace(rows, masks=None)).tokens[0::4]
    assert tokens[0::4].equal(expected)


def of_parts(name: str, vocab: int, dtype: str = "f32", bucket: int = 1) -> Any:
    shape = {"vocab": vocab, "ranks": 3}
    where = OpContext(op=f"sample.{name}", device=H200, dtype=dtype, shape=shape, bucket=bucket)  # type: ignore[arg-type]
    return import_module(f"llmcore_triton.sample.{name}").make(where), where


@DTYPE
@pytest.mark.parametrize("name", ["best", "part", "pick"])
def test_the_samples_of_ops_over_parts(name: str, dtype: str) -> None:
    for vocab, bucket in ((9100, 0), (300, 1), (60, 1)):
        kernel, where = of_parts(name, vocab, dtype, bucket)
        assert check(import_module(f"llmcore.ops.sample_{name}"), kernel, where) > 0


@pytest.mark.parametrize(("dtype", "vocab", "share"), [("f32", 5000, 1792), ("f16", 9100, 4608), ("f32", 131, 128)])
@pytest.mark.parametrize("greedy", [True, False])
def test_parts_draw_the_tokens_of_whole_rows(dtype: str, vocab: int, share: int, greedy: bool) -> None:
    """Of three parts, the last is empty where two hold all tokens. Columns behind a part are not read."""
    count = 14
    logits = logits_of(count, vocab, dtype)
    logits[0, [5, vocab - 1]] = 60.0
    logits[1:4] = 0.0
    for row, (place, value) in enumerate([(3, torch.nan), (vocab - 1, torch.nan), (0, -torch.inf), (130, torch.inf)]):
        logits[4 + row, place] = value
    rows = rows_of(count, temperature=0.0 if greedy else 0.9)
    rows.temperature[::5] = 0.0
    starts = [min(rank * share, vocab) for rank in range(3)]
    wide = torch.full((count, vocab + 7), torch.nan, dtype=logits.dtype)
    wide[:, :vocab] = logits
    parts = [(wide[:, first : min(first + share, vocab)], first) for first in starts]
    best, part, pick = (of_parts(name, vocab, dtype)[0] for name in ("best", "part", "pick"))
    found = torch.stack([best(*cut) for cut in parts])
    drawn = found if greedy else torch.stack([part(*cut, found, rows) for cut in parts])
    tokens, finite = pick(found, drawn, rows.temperature)
    alone = sampler("greedy" if greedy else "temperature", vocab, dtype)(logits, rows)
    assert torch.equal(finite, alone.finite) and finite.tolist() == [True] * 4 + [False] * 4 + [True] * 6
    assert tokens.dtype == torch.int32 and torch.equal(tokens[finite], alone.tokens[finite])
    assert bool(((tokens >= 0) & (tokens < vocab)).all())
    if not greedy:
        assert len({int(token) // share for token in tokens}) > 1
