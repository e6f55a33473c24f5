"""The kernels over several ranks in the interpreter: all ranks' slots in one process, one half after the other.

The second half of a kernel waits for what the first half of all ranks has sent.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import add_rms_norm
from llmcore_triton.comm.one_shot import OneShot
from llmcore_triton.comm.shared import BITS, EMPTY, Shared, sized
from llmcore_triton.specs.comm import SLOTS

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=1)
SIZE, ROWS = 40, 12
"""Numbers of a row, and rows that fit into a slot."""


class Ranks:
    """The slots of all ranks, and calls of a kernel on each."""

    def __init__(self, ranks: int) -> None:
        self.kept: list[dict[int, Shared]] = [{} for _ in range(ranks)]
        for element, bits in BITS.items():
            owns = [torch.empty(SLOTS * (ranks - 1) * ROWS * SIZE, dtype=bits) for _ in range(ranks)]
            buffers = torch.tensor([own.data_ptr() for own in owns])
            for rank, own in enumerate(owns):
                self.kept[rank][element] = sized(rank, ranks, own, buffers)

    def call(self, method: str, given: list[tuple[Any, ...]]) -> list[Any]:
        """What each rank returns."""
        shape = {"group": "attn_tp", "ranks": len(given), "size": SIZE}
        context = OpContext(op="comm.all_reduce", device=H200, dtype="bf16", bucket=1, shape=shape)
        for send in (True, False):
            results = [
                getattr(OneShot(kept.__getitem__, context, send=send, receive=not send), method)(*arguments)
                for kept, arguments in zip(self.kept, given, strict=True)
            ]
        return results

    @property
    def empty(self) -> bool:
        """True if every place has been made EMPTY again."""
        return all((one.own == EMPTY[element]).all() for kept in self.kept for element, one in kept.items())

    @property
    def calls(self) -> list[int]:
        """The calls with two-byte elements that each rank has counted."""
        return [int(kept[2].state[0]) for kept in self.kept]


def rows(ranks: int, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    drawn = [torch.randn(tokens, SIZE, generator=draw).to(dtype) for _ in range(ranks)]
    for one in drawn:
        one[0, :2] = torch.tensor([-0.0, float("inf")])  # the first looks like a place that is EMPTY
    return drawn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 1), (3, 7), (2, ROWS)])
def test_sum(ranks: int, tokens: int, dtype: torch.dtype) -> None:
    group = Ranks(ranks)
    for again in range(3):
        given = [x + again for x in rows(ranks, tokens, dtype)]
        total = given[0].float()
        for other in given[1:]:
            total = total + other.float()
        first, *others = group.call("sum", [(x,) for x in given])
        assert all(torch.equal(first, other) for other in others)
        # the interpreter does not round to bf16, it cuts
        torch.testing.assert_close(first, total.to(dtype), rtol=8e-3 if dtype == torch.bfloat16 else 0, atol=0)
        assert group.empty
    assert dtype == torch.float32 or group.calls == [3] * ranks


def test_a_sum_and_its_norm_are_those_of_the_separate_ops() -> None:
    group, given = Ranks(2), rows(2, 5, torch.bfloat16)
    for x in given:
        x[0, 1] = 0.5
    draw = torch.Generator().manual_seed(1)
    residual = torch.randn(5, SIZE, generator=draw).bfloat16()
    weight = torch.rand(SIZE, generator=draw).bfloat16() + 0.5
    total = (given[0].float() + given[1].float()).bfloat16()
    normed, summed = add_rms_norm.reference(total, residual, weight, 1e-5)
    for x, sums in group.call("add_norm", [(x, residual.clone(), weight, 1e-5) for x in given]):
        torch.testing.assert_close(sums, summed, rtol=1.6e-2, atol=1e-2)
        torch.testing.assert_close(x, normed, rtol=1.6e-2, atol=1e-2)
    assert group.empty


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gathers(dtype: torch.dtype) -> None:
    group, given = Ranks(3), rows(3, 4, dtype)
    for found in group.call("joined", [(x,) for x in given]):
        assert torch.equal(found, torch.cat(given, 1))
    for found in group.call("stacked", [(x,) for x in given]):
        assert torch.equal(found, torch.stack(given))
    assert group.empty


def test_no_rows_need_no_call() -> None:
    nothing = torch.empty(0, SIZE, dtype=torch.bfloat16)
    group = Ranks(2)
    assert [tuple(x.shape) for x in group.call("sum", [(nothing,)] * 2)] == [(0, SIZE)] * 2
    assert group.calls == [0, 0]


def test_other_numbers_than_floats_are_refused() -> None:
    whole = torch.ones(1, SIZE, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"sends rows of floats, not torch\.int32"):
        Ranks(2).call("stacked", [(whole,)] * 2)
