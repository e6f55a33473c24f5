"""The ops around a step's forward, on tables small enough to read."""

from __future__ import annotations

import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import kv_slots, rope_angles, step_inputs, step_outputs
from llmcore.ops.silu_and_mul import make, reference


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_inputs_are_the_tokens_after_the_computed_ones() -> None:
    history = torch.tensor([[10, 11, 12, 13], [20, 21, -1, -1], [0, -1, -1, -1]], dtype=torch.int32)
    state = (history, ints(1, 1, 0), ints(4, 1, 0))
    got = step_inputs.reference(state, ints(1, 0, 2), ints(1, 3, 0), ints(0, 1, 1, 1, 2), ints(0, 0, 1, 2, 0))
    tokens, positions, owner, prompt_len, kv_len = got
    assert tokens.tolist() == [21, 11, 12, 13, 0]
    assert positions.tolist() == [1, 1, 2, 3, 0]
    assert owner.tolist() == [1, 0, 0, 0, 2]
    assert prompt_len.tolist() == [1, 4, 4, 4, 0]
    assert kv_len.tolist() == [2, 4, 0]
    assert [t.dtype for t in got] == [torch.int64] + [torch.int32] * 4


def test_outputs_end_the_histories() -> None:
    history = torch.tensor([[10, -1, -1], [20, 21, -1], [30, 31, 32]], dtype=torch.int32)
    lengths, computed = ints(1, 2, 3), ints(0, 1, 0)
    finite = torch.tensor([True, False, True])
    read = step_outputs.reference(
        (history, lengths, computed), ints(1, 0, 2, 2), ints(1, 1, 0, 0), ints(1, 2, 2), ints(7, 8, 8), finite, 9
    )
    assert read.tolist() == [7, -1, 8]
    assert history.tolist() == [[10, -1, -1], [20, 21, 7], [30, 31, 8]]
    assert lengths.tolist() == [1, 3, 3]
    assert computed.tolist() == [1, 2, 0]


def test_the_next_step_reads_no_token_that_is_none() -> None:
    drawn, finite = ints(0, 8, 9, 1 << 30, -1, -5, 3, -1), torch.tensor([True] * 6 + [False] * 2)
    rows = torch.arange(8, dtype=torch.int32)
    history, lengths = torch.full((8, 2), 7, dtype=torch.int32), torch.ones(8, dtype=torch.int32)
    read = step_outputs.reference((history, lengths, rows * 0), rows, rows * 0, rows, drawn, finite, 9)
    assert read.tolist() == [0, 8, *[-1] * 6]
    assert history[:, 1].tolist() == [0, 8, *[0] * 6]


def test_slots_of_granules() -> None:
    table = torch.tensor([[5, 2], [0, 9]], dtype=torch.int32)
    slots = kv_slots.slots_of(table, ints(0, 0, 1, 1), ints(3, 4, 0, 7), 4)
    assert (slots.tolist(), slots.dtype) == ([23, 8, 0, 39], torch.int64)
    assert kv_slots.slots_of(table, ints(0, 1), ints(1, 1)).tolist() == [2, 9]


def test_angles_are_there_twice_and_one_sine_negated() -> None:
    frequencies = torch.tensor([1.0, 0.25])
    cos, sin = rope_angles.reference(ints(0, 3), frequencies, 2.0)
    angle = torch.tensor([3.0, 0.75])
    torch.testing.assert_close(cos[1], 2 * torch.cat((angle.cos(), angle.cos())))
    torch.testing.assert_close(sin[1], 2 * torch.cat((-angle.sin(), angle.sin())))
    assert cos[0].tolist() == [2.0] * 4 and sin[0].tolist() == [0.0] * 4


def test_where_all_must_agree_silu_rounds_alike_in_every_bucket() -> None:
    for bucket in range(5):
        context = OpContext(
            op="silu_and_mul", device=DeviceInfo("cpu"), dtype="bf16", bucket=bucket, deterministic=True
        )
        assert make(context) is reference
