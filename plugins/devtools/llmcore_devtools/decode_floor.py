"""What a decode step has to move and to compute, as its ops declare it: the floor under its time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmcore.api.specs import OpSpec
from llmcore.layers.build import Build
from llmcore.ops import DTYPES


@dataclass(frozen=True)
class OpFloor:
    """All calls of one op of one shape in a step. `moved`: bytes of all calls; `flops` likewise."""

    op: str
    calls: int
    moved: float
    flops: float


def decode_floor(build: Build, rows: int, kv_len: int, touched: float | None = None) -> list[OpFloor]:
    """Of `rows` rows that decode over `kv_len` tokens each, by the model that `build` (a DryBuild will do) was for.

    `touched`: experts that a mixture reads in such a step, where somebody counted; else what even choices give.
    Sampling and the bookkeeping around the forward are not in it; a norm is in it with and without the residual's
    addition, because layers ask for both and call one (less than 1 % of an 8B model's bytes).
    """
    element = DTYPES[build.config.dtype].itemsize
    found = []
    for (op, sizes), calls in sorted((+build.asked).items(), key=repr):
        cost: Callable[..., tuple[float, float]] = importlib.import_module(build.registry.find(OpSpec, op).module).cost
        shape = {**dict(sizes), "element": element, **({} if touched is None else {"touched": touched})}
        if op.startswith("attn.") and op.endswith(".decode"):
            seen = min(kv_len, shape.get("window") or kv_len)
            moved, flops = cost({**shape, "tokens": 1, "kv_len": seen})
            moved, flops = rows * moved, rows * flops
        else:
            moved, flops = cost({**shape, "tokens": rows, "kv_len": 0})
        found.append(OpFloor(op, calls, calls * moved, calls * flops))
    return found


def seconds(floor: Iterable[OpFloor], copy: float, matmul: float) -> float:
    """The least time that these ops take, one after the other, at `copy` bytes and `matmul` flops per second."""
    return sum(max(part.moved / copy, part.flops / matmul) for part in floor)
