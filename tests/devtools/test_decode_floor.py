"""What a decode step has to move: counted from what modules ask for, against parameters and KV counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmcore.api.specs import DeviceInfo
from llmcore.engine.dry_model import dry_model
from llmcore.registry.modes import Pins
from llmcore.weights.source import open_checkpoint, read_model
from llmcore_devtools.decode_floor import decode_floor, seconds
from llmcore_devtools.loaded_model import registry_for_tests

LLAMA_8B = Path(__file__).parents[2] / "benchmarks" / "configs" / "llama-3.1-8b"


@pytest.fixture(scope="module")
def build():
    registry = registry_for_tests()
    family, config = read_model(registry, open_checkpoint(registry, LLAMA_8B, weights=False).config(), None)
    return dry_model(family, config, registry, DeviceInfo("cpu"), Pins())[1]


@pytest.mark.parametrize("rows", [1, 64])
def test_a_step_reads_weights_once_and_kv_of_every_row(build, rows: int) -> None:
    floor = decode_floor(build, rows, 500)
    layer = 4096 * (6144 + 4096 + 3 * 14336)
    weights = 2 * (32 * layer + 4096 * 128256)
    linears = [part for part in floor if part.op.startswith("linear")]
    assert sum(part.calls for part in linears) == 4 * 32 + 1
    activations = sum(part.moved for part in linears) - weights
    assert 0 < activations < 0.001 * weights * rows
    assert sum(part.flops for part in linears) == pytest.approx(rows * weights, rel=0.01)
    (attention,) = (part for part in floor if part.op == "attn.gqa.decode")
    assert attention.calls == 32
    assert attention.moved == pytest.approx(32 * rows * 500 * 2 * 2 * 8 * 128, rel=0.01)


def test_time_is_the_longer_of_moving_and_computing_op_by_op(build) -> None:
    floor = decode_floor(build, 8, 100)
    moved, flops = sum(part.moved for part in floor), sum(part.flops for part in floor)
    assert seconds(floor, 1e12, 1e30) == pytest.approx(moved / 1e12)
    assert seconds(floor, 1e30, 1e15) == pytest.approx(flops / 1e15)
    assert seconds(floor, 1e12, 1e15) >= max(moved / 1e12, flops / 1e15)
