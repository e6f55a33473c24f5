"""What MLA holds at once: a step over cached tokens takes no more than the largest prompt, which a start measures."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api.protocols import AttnLimits
from llmcore.weights.load import finish
from llmcore_deepseek.latent import LatentSizes
from llmcore_deepseek.mla import MLA
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.deepseek.test_mla import HIDDEN, SPEC, TOKENS, Row, Session, drawn, make_build, make_layer

LARGEST = 100
LISTS = 2048
"""Bytes of slots and borders: a few for every cached token, over all layers."""


class Held(TorchDispatchMode):
    """Counts bytes of the tensors that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def without_scores(layer: MLA, kernels: Sequence[Any]) -> None:
    """Attention that makes its results and nothing else: references hold all scores."""
    n = layer.sizes

    def varlen(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return q.new_empty(len(q), n.heads, n.value), q.new_empty(len(q), n.heads)

    class Absorbed:
        def run(self, *given: Any) -> Any:
            return given[5]

        def plan(self, *given: Any) -> str:
            return "any"

    layer._causal = layer._full = (varlen,) * 5
    layer._merge = (lambda parts, lses: (parts[0].clone(), lses[0].clone()),) * 5
    layer._rope_write = (lambda q, row, *rest: (q, row),) * 5
    for kernel in kernels:
        kernel.kernel = Absorbed()


def peak(rows: Sequence[Row], expanded: bool, heads: int) -> int:
    """Bytes that a step of these rows takes."""
    build = make_build()
    layer = drawn(make_layer(build, replace(SPEC, heads=heads, plain=10, value=10)))
    finish(layer)
    kernels: Any = build.attention_kernels["all"].prefill
    for kernel in kernels:
        kernel.workspace(AttnLimits(rows=8, tokens=LARGEST, kv_len=TOKENS))
    without_scores(layer, kernels)
    step, keys = Session(layer, build).step(rows)
    assert keys == ["" if expanded else "any"]
    x = torch.zeros(sum(row.count for row in rows), HIDDEN)
    with torch.inference_mode(), Held() as held:
        layer(x, step)
    return held.peak


@pytest.mark.parametrize("heads", [16, 32])
def test_no_step_takes_more_than_the_largest_prompt(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = peak([Row(0, LARGEST)], True, heads)
    for expanded in (True, False):
        monkeypatch.setattr(LatentSizes, "costs", lambda *rows, answer=(1, 0) if expanded else (0, 1): answer)
        for rows in ([Row(28, LARGEST)], [Row(TOKENS - 20, 20)] * 5, [Row(TOKENS - 9, 9)] * 6, [Row(90, 30)]):
            assert peak(rows, expanded, heads) <= measured + LISTS
