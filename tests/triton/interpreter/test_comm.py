"""The kernels over several ranks in the interpreter: all ranks' slots in one process, one part after the other.

A part of a kernel waits for what the part before it has sent on other ranks.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import add_rms_norm
from llmcore_triton.comm.one_shot import OneShot
from llmcore_triton.comm.shared import BITS, EMPTY, Shared, sized
from llmcore_triton.comm.slots import Sums
from llmcore_triton.comm.two_shot import TwoShot
from llmcore_triton.specs.comm import SLOTS

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=1)
SIZE, ROWS = 40, 12
"""Numbers of a row, and rows of a sender in a slot."""
LONGEST = 60.0
"""Seconds after which a rank counts as hung."""

Kind = type[OneShot] | type[TwoShot]
PARTS: dict[Kind, tuple[dict[str, bool], ...]] = {
    OneShot: ({"receive": False}, {"send": False}),
    TwoShot: ({"sum": False, "take": False}, {"send": False, "take": False}, {"send": False, "sum": False}),
}
KINDS = pytest.mark.parametrize("kind", PARTS)


@dataclass
class Call:
    """A sum of `x` of each rank into `out`, NaN at first. With `residual` of each rank also its norm."""

    kind: Kind
    x: list[torch.Tensor]
    residual: list[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self.out = [torch.full_like(x, torch.nan) for x in self.x]
        self.weight = torch.linspace(0.5, 1.5, self.x[0].shape[1]).to(self.x[0].dtype)

    def awaits(self, rank: int, part: int) -> set[int]:
        """The ranks whose part before this one must have run."""
        owners = set(range(min(len(self.x[0]), len(self.x))))
        if part == 0 or (self.kind is TwoShot and part == 1 and rank not in owners):
            return set()
        return owners if part == 2 else set(range(len(self.x)))


class Ranks:
    """The slots of all ranks, and calls of a kernel on each."""

    def __init__(self, ranks: int, size: int = SIZE) -> None:
        self.size = size
        self.kept: list[dict[int, Shared]] = [{} for _ in range(ranks)]
        for element, bits in BITS.items():
            owns = [torch.empty(SLOTS * (ranks - 1) * ROWS * size, dtype=bits).share_memory_() for _ in range(ranks)]
            buffers = torch.tensor([own.data_ptr() for own in owns])
            for rank, own in enumerate(owns):
                self.kept[rank][element] = sized(rank, ranks, own, buffers)

    def made(self, kind: Kind, rank: int, **parts: bool) -> Sums:
        """A kernel on a rank; without the parts that are False."""
        shape = {"group": "attn_tp", "ranks": len(self.kept), "size": self.size}
        context = OpContext(op="comm.all_reduce", device=H200, dtype="bf16", bucket=1, shape=shape)
        return kind(self.kept[rank].__getitem__, context, **parts)

    def gathered(self, method: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a method of OneShot that gathers."""
        for part in PARTS[OneShot]:
            results = [getattr(self.made(OneShot, rank, **part), method)(x) for rank, x in enumerate(given)]
        return results

    def run(self, call: Call, rank: int, part: int) -> None:
        """A part of a call on a rank."""
        x, out = call.x[rank], call.out[rank]
        residual = x if call.residual is None else call.residual[rank]
        self.made(call.kind, rank, **PARTS[call.kind][part]).summed(
            x, residual, call.weight, out, 1e-5, norm=call.residual is not None
        )

    def summed(self, call: Call) -> list[torch.Tensor]:
        """The results of all ranks, one part after the other."""
        for part in range(len(PARTS[call.kind])):
            for rank in range(len(self.kept)):
                self.run(call, rank, part)
        return call.out

    def raced(self, calls: Sequence[Call], pick: Callable[[list[int]], int]) -> None:
        """All calls. `pick`: of the ranks that need not wait, the one that goes on."""
        parts = [(call, part) for call in calls for part in range(len(PARTS[call.kind]))]
        done = [0] * len(self.kept)

        def waits(rank: int) -> bool:
            call, part = parts[done[rank]]
            return any(done[other] < done[rank] for other in call.awaits(rank, part))

        while going := [rank for rank, count in enumerate(done) if count < len(parts) and not waits(rank)]:
            rank = pick(going)
            call, part = parts[done[rank]]
            self.run(call, rank, part)
            done[rank] += 1
        assert done == [len(parts)] * len(done)

    @property
    def empty(self) -> bool:
        """True if every place has been made EMPTY again."""
        return all((one.own == EMPTY[element]).all() for kept in self.kept for element, one in kept.items())

    @property
    def calls(self) -> list[int]:
        """The calls with two-byte elements that each rank has counted."""
        return [int(kept[2].state[0]) for kept in self.kept]


def rows(ranks: int, tokens: int, dtype: torch.dtype, size: int = SIZE) -> list[torch.Tensor]:
    """Rows of each rank, with numbers that are hard to send or to sum."""
    draw = torch.Generator().manual_seed(tokens)
    drawn = [torch.randn(tokens, size, generator=draw).to(dtype) for _ in range(ranks)]
    least = torch.finfo(dtype).smallest_normal / 4
    for rank, one in enumerate(drawn):
        sign = -1.0 if rank % 2 else 1.0
        # -0.0 looks like a place that is EMPTY
        one[0, :6] = torch.tensor([-0.0, torch.inf, sign * 3, -0.0 * sign, -sign * least, sign * torch.inf])
    return drawn


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if the bits are the same."""
    kind = BITS[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 1), (3, 7), (2, ROWS)])
def test_sum(kind: Kind, ranks: int, tokens: int, dtype: torch.dtype) -> None:
    group = Ranks(ranks)
    for again in range(3):
        given = [x + again for x in rows(ranks, tokens, dtype)]
        total = given[0].float()
        for other in given[1:]:
            total = total + other.float()
        first, *others = group.summed(Call(kind, given))
        assert all(same(first, other) for other in others)
        # the interpreter does not round to bf16, it cuts, and the least numbers become zero
        rtol, atol = (8e-3, torch.finfo(dtype).tiny) if dtype == torch.bfloat16 else (0.0, 0.0)
        torch.testing.assert_close(first, total.to(dtype), rtol=rtol, atol=atol, equal_nan=True)
        assert group.empty
    assert dtype == torch.float32 or group.calls == [3] * ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("ranks", "tokens", "size"), [(2, 5, 33), (4, 1, 40), (4, 3, 40), (4, 11, 33), (8, 9, 24)])
@pytest.mark.parametrize("norm", [False, True])
def test_both_kernels_give_the_same_bits(ranks: int, tokens: int, size: int, norm: bool, dtype: torch.dtype) -> None:
    group, given = Ranks(ranks, size), rows(ranks, tokens, dtype, size)
    residual = torch.randn(tokens, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    calls = [Call(kind, given, [residual.clone() for _ in given] if norm else None) for kind in PARTS]
    for call in calls:
        group.summed(call)
        assert group.empty
    first = calls[0].out[0]
    assert all(same(first, out) for call in calls for out in call.out)
    if norm:
        first = calls[0].residual[0]
        assert not same(first, residual)
        assert all(same(first, one) for call in calls for one in call.residual)


@KINDS
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_largest_call_fits_into_a_slot(kind: Kind, ranks: int) -> None:
    group = Ranks(ranks)
    most = group.made(kind, 0)._rows(group.kept[0][4])
    assert most == (ROWS if kind is OneShot else ROWS // 2 * ranks)
    call = Call(kind, rows(ranks, most, torch.float32))
    group.summed(call)
    total = torch.stack(call.x).sum(0)
    for out in call.out:
        torch.testing.assert_close(out, total, equal_nan=True)
    assert group.empty


@KINDS
def test_a_sum_and_its_norm_are_those_of_the_separate_ops(kind: Kind) -> None:
    group, given = Ranks(2), rows(2, 5, torch.bfloat16)
    for x in given:
        x[0, :6] = 0.5
    residual = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    call = Call(kind, given, [residual.clone() for _ in given])
    total = (given[0].float() + given[1].float()).bfloat16()
    normed, summed = add_rms_norm.reference(total, residual, call.weight, 1e-5)
    for x, sums in zip(group.summed(call), call.residual or (), strict=True):
        torch.testing.assert_close(sums, summed, rtol=1.6e-2, atol=1e-2)
        torch.testing.assert_close(x, normed, rtol=1.6e-2, atol=1e-2)
    assert group.empty


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_run_ahead_disturb_no_other(ranks: int, seed: int) -> None:
    """Calls of both kernels and of changing sizes: each rank goes as far ahead as the others let it."""
    group, chance = Ranks(ranks), random.Random(seed)
    calls = [
        Call(chance.choice(list(PARTS)), rows(ranks, chance.choice((1, 2, 3, 7, ROWS)), torch.float16))
        for _ in range(12)
    ]
    pick = (min, max, chance.choice, chance.choice)[seed]
    group.raced(calls, pick)
    for call in calls:
        alone = Ranks(ranks).summed(Call(OneShot, call.x))
        assert all(same(alone[0], out) for out in call.out)
    assert group.empty and group.calls == [12] * ranks


def test_ranks_at_once() -> None:
    """Whole kernels in processes that wait for each other, and calls that need several slots."""
    group = Ranks(3)
    calls = [(kind, rows(3, tokens, torch.float16)) for tokens in (40, 1, 14, 2) for kind in PARTS]
    found = [[x.clone().share_memory_() for x in given] for _, given in calls]

    def follow(rank: int) -> None:
        for (kind, given), into in zip(calls, found, strict=True):
            into[rank].copy_(group.made(kind, rank).sum(given[rank]))

    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=follow, args=(rank,), daemon=True) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LONGEST)
    ended = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert ended == [0, 0, 0], "a rank waits for ever"
    for one, two, (_, given) in zip(found[::2], found[1::2], calls[::2], strict=True):
        total = (given[0].float() + given[1].float() + given[2].float()).half()
        torch.testing.assert_close(one[0], total, rtol=0, atol=0, equal_nan=True)
        assert all(same(one[0], other) for other in (*one, *two))
    assert group.empty


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gathers(dtype: torch.dtype) -> None:
    group, given = Ranks(3), rows(3, 4, dtype)
    for found in group.gathered("joined", given):
        assert torch.equal(found, torch.cat(given, 1))
    for found in group.gathered("stacked", given):
        assert torch.equal(found, torch.stack(given))
    assert group.empty


@KINDS
def test_no_rows_need_no_call(kind: Kind) -> None:
    nothing = torch.empty(0, SIZE, dtype=torch.bfloat16)
    group = Ranks(2)
    assert tuple(group.made(kind, 0).sum(nothing).shape) == (0, SIZE)
    assert group.calls == [0, 0]


@KINDS
def test_other_numbers_than_floats_are_refused(kind: Kind) -> None:
    whole = torch.ones(1, SIZE, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"rows of floats can be sent, and not torch\.int32; use kernel nccl"):
        Ranks(2).made(kind, 0).sum(whole)
