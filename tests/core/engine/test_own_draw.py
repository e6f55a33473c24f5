"""Ranks that draw from their own logits get the tokens of one rank that draws from all, to the bit.

The ranks are threads of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api.bridge import SamplingParams
from llmcore.api.models import ModelConfig
from llmcore.api.specs import DeviceInfo
from llmcore.config import Config
from llmcore.engine.own_draw import OWN_VARIANTS, OwnSampler, own_samplers
from llmcore.engine.sampler import variant_of
from llmcore.layers import Build
from llmcore.layers.embedding import held_tokens
from llmcore.layers.mesh import Mesh, tensor_parallel
from llmcore.ops.sample import VARIANTS, Sampled, SampleRows, plain_rows
from llmcore.registry.loader import build_registry
from llmcore.registry.modes import Pins
from torch import Tensor

REGISTRY = build_registry(Config())
KERNELS = pytest.mark.parametrize("kernel", ["torch", "cpu"])
RANKS = pytest.mark.parametrize("ranks", [2, 3])


class Meeting:
    """An exchange of `ranks` threads."""

    def __init__(self, ranks: int) -> None:
        self.count = 0
        self._given: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=20)

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def exchange(x: Tensor) -> Tensor:
            self._given[rank] = x
            self._barrier.wait()
            found = torch.stack(self._given)
            if self._barrier.wait() == 0:
                self.count += 1
            return found

        return exchange


def build(vocab: int, mesh: Mesh, kernel: str) -> Build:
    sizes = {"hidden_size": 8, "num_layers": 1, "max_position": 10, "dtype": "f32", "kv_groups": ()}
    return Build(
        registry=REGISTRY,
        config=ModelConfig(architecture="Test", vocab_size=vocab, **sizes),  # type: ignore[arg-type]
        device=DeviceInfo("cpu"),
        torch_device=torch.device("cpu"),
        mesh=mesh,
        pins=Pins(kernels={"sample": kernel, "sample.part": kernel}),
    )


def drawn(variant: str, logits: Tensor, rows: SampleRows, ranks: int, kernel: str, exchanges: int) -> Sampled:
    """The tokens and flags that every rank gets."""
    meeting, vocabulary = Meeting(ranks), logits.shape[1]

    def draw(rank: int) -> Sampled:
        where = build(vocabulary, tensor_parallel(rank, ranks), kernel)
        sampler: Any = own_samplers(where)[variant][1]
        assert isinstance(sampler, OwnSampler)
        first, number = held_tokens(where, vocabulary)
        return replace(sampler, exchange=meeting.of(rank))(logits[:, first : first + number], rows)

    with ThreadPoolExecutor(ranks) as pool:
        first, *others = pool.map(draw, range(ranks))
    assert all(torch.equal(first.tokens, other.tokens) and torch.equal(first.finite, other.finite) for other in others)
    assert first.tokens.dtype == torch.int32 and first.finite.dtype == torch.bool
    assert meeting.count == exchanges
    return first


def check(variant: str, logits: Tensor, rows: SampleRows, ranks: int, kernel: str) -> Sampled:
    """The tokens are those of one rank; rows that are not finite also get some token."""
    got = drawn(variant, logits, rows, ranks, kernel, 1 + (variant == "temperature"))
    alone: Sampled = build(logits.shape[1], Mesh(), kernel).op("sample", variant=variant)[1](logits, rows)
    assert torch.equal(got.finite, alone.finite)
    assert torch.equal(got.tokens[got.finite], alone.tokens[got.finite])
    assert bool(((got.tokens >= 0) & (got.tokens < logits.shape[1])).all())
    return got


def logits_of(rows: int, vocab: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * scale


def seeds(count: int, **columns: float) -> SampleRows:
    """Rows of as many seeds."""
    rows = plain_rows(count, **columns)
    wide = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=torch.Generator().manual_seed(2))
    return replace(rows, seed=wide, choice=torch.arange(count) % 3, position=torch.arange(count) % 50)


VOCABULARIES = pytest.mark.parametrize("vocab", [700, 131, 128, 1024])
"""Of three parts, the last is padded, empty, one of two that are empty, and padded. Two parts of 1,024 are whole."""


@VOCABULARIES
@RANKS
@KERNELS
def test_a_thousand_seeds_draw_the_tokens_of_one_rank(vocab: int, ranks: int, kernel: str) -> None:
    rows = seeds(1000, temperature=0.9)
    rows.temperature[::10], rows.temperature[1::10] = 0.0, 2.5
    tokens = check("temperature", logits_of(1, vocab).expand(1000, -1), rows, ranks, kernel).tokens
    best = int(logits_of(1, vocab).argmax())
    assert tokens[::10].tolist() == [best] * 100
    parts = {int(token) // 128 for token in tokens}
    assert len(parts) == -(-vocab // 128), "there are draws from every block"


@VOCABULARIES
@RANKS
def test_greedy_rows_take_the_first_of_the_best(vocab: int, ranks: int) -> None:
    logits = logits_of(40, vocab)
    logits[::4, 3], logits[::4, vocab - 1] = 50.0, 50.0
    logits[1::4, vocab - 1] = 50.0
    logits[2::4] = -4.0
    tokens = check("greedy", logits, plain_rows(40, temperature=0.0), ranks, "torch").tokens
    assert tokens[:3].tolist() == [3, vocab - 1, 0]


@RANKS
@KERNELS
def test_parts_of_equal_weight(ranks: int, kernel: str) -> None:
    """Every block of a flat row has the same mass, so random numbers alone decide."""
    check("temperature", torch.zeros(300, 768), seeds(300, temperature=0.7), ranks, kernel)


@RANKS
@KERNELS
@pytest.mark.parametrize("variant", OWN_VARIANTS)
def test_one_part_that_is_not_finite_is_named_by_all(variant: str, ranks: int, kernel: str) -> None:
    logits = logits_of(12, 700)
    for row, (at, value) in enumerate(
        [(0, torch.nan), (699, torch.nan), (300, torch.inf), (699, -torch.inf), (200, -torch.inf), (5, torch.inf)]
    ):
        logits[2 * row, at] = value
    logits[10] = -torch.inf
    rows = seeds(12, temperature=0.0 if variant == "greedy" else 0.8)
    assert check(variant, logits, rows, ranks, kernel).finite.tolist() == [False, True] * 6


def test_half_types_draw_as_on_one_rank() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        check("temperature", logits_of(200, 700).to(dtype), seeds(200, temperature=0.8), 3, "cpu")


def test_weights_have_the_bits_of_the_whole_row() -> None:
    """One part that is the whole vocabulary weighs its heaviest block as the parts of three ranks do."""
    logits, rows = logits_of(50, 700), seeds(50)
    for kernel in ("torch", "cpu"):
        op = build(700, Mesh(), kernel).op
        best, part = (op(f"sample.{name}", vocab=700, ranks=3)[1] for name in ("best", "part"))
        whole = part(logits, 0, best(logits, 0)[None], rows)
        cuts = [(logits[:, first : first + 256], first) for first in (0, 256, 512)]
        found = torch.stack([best(*cut) for cut in cuts])
        parts = torch.stack([part(*cut, found, rows) for cut in cuts])
        heaviest = parts[..., 0].argmax(0)
        assert torch.equal(parts[heaviest, torch.arange(50)], whole)


def test_whole_rows_are_gathered_for_all_but_two_kinds_of_draws() -> None:
    """Log-probabilities need the sum over the vocabulary, filters its order, and penalties come before both."""
    own = SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(temperature=0.5)
    assert {VARIANTS[variant_of(way)] for way in own} == set(OWN_VARIANTS)
    ways: dict[str, Any] = {
        **{"logprobs": 0, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.1},
        **{"frequency_penalty": 0.1, "logit_bias": {1: 2.0}, "allowed_ids": (1,)},
    }
    for name, value in ways.items():
        assert VARIANTS[variant_of(SamplingParams(**{name: value}))] not in OWN_VARIANTS, name


def test_one_rank_has_no_such_draw() -> None:
    made = build(700, Mesh(), "torch")
    assert own_samplers(made) == {}
    assert not made.resolutions


def test_parts_of_a_vocabulary_cover_it_once() -> None:
    for vocab in (1, 128, 131, 700, 128256):
        for ranks in (1, 2, 3, 8):
            cuts = [held_tokens(build(vocab, tensor_parallel(rank, ranks), "torch"), vocab) for rank in range(ranks)]
            assert [first for first, _ in cuts] == [sum(n for _, n in cuts[:rank]) for rank in range(ranks)]
            assert sum(number for _, number in cuts) == vocab
            assert all(first % 128 == 0 for first, number in cuts if number)
