"""Checksums, for every step, of the tensors that all ranks of a model must have alike, and their comparison.

The checksums are made on the device and added to a table there, inside captured steps too. The host never waits for
them. When the engine ends, each process writes its table to a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llmcore.api.errors import LlmcoreError
from llmcore.api.models import KVGroupSpec, LayerInfo
from llmcore.api.specs import PluginInfo, bucket_of
from llmcore.config import Config
from llmcore.layers import Hidden, Partial, Rows, Step
from llmcore.layers.decoder import Halves
from llmcore.layers.step import Bucketed
from llmcore.ops import Op
from torch import nn

COLUMNS: Mapping[str, str] = {
    "tokens": "the ids that a step reads: those of prompts, and those drawn in the steps before",
    "lengths": "the positions of these tokens",
    "router": "the experts of each token and their weights, of every mixture whose route is an op of its own",
    "kv": "what a step stores of KV that every rank has, such as the latents of MLA",
    "residual": "the last layer's sum over the ranks, and the residual, of the sampled tokens",
}
"""Each column of the comparison, and its content."""

CAPACITY = 1 << 16
"""Steps with a row of their own. Later ones are added to the rows of earlier ones."""

_PLUGIN = PluginInfo(
    "rank-observer", "llmcore-devtools", version("llmcore-devtools"), "llmcore_devtools.bench.observer"
)
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_FACTOR = 0x1E3779B97F4A7C15


def observed(config: Config, folder: Path) -> Config:
    """The config of an engine whose processes write their tables into `folder` when they end."""
    options = {**config.plugin_options, "observed_into": str(folder)}
    return replace(config, plugin_options=options, discovered=(*config.discovered, _PLUGIN))


def checksum(x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """A number [] int64 that changes with any bit of the rows of `x` [T, N, ...] for which `real` [T] is true.

    Words are mixed with their places and added modulo 2^64, which gives the same in any order of additions.
    """
    rows = x.flatten(1).clone(memory_format=torch.contiguous_format)
    width = next(size for size in _WORDS if rows.shape[1] * rows.itemsize % size == 0)
    words = rows.view(torch.uint8).view(_WORDS[width]).long()
    return torch.where(real, _mixed(_mixed(words).sum(1)), 0).sum()


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """[..., N] int64, each mixed with its place so that every bit changes about half of the others (MurmurHash3)."""
    mixed = words ^ torch.arange(1, words.shape[-1] + 1, device=words.device) * _FACTOR
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 33 & 0x7FFFFFFF)) * _FACTOR
    return mixed ^ (mixed >> 33 & 0x7FFFFFFF)


class Ledger:
    """The table of one process: a row for each step, and a column of checksums for each of COLUMNS."""

    def __init__(self) -> None:
        self._table: torch.Tensor | None = None
        self._steps = self._real = torch.empty(0)
        self._calls = 0

    def begin(self, step: Step) -> None:
        """Begin the row of a step, with its tokens and lengths."""
        if self._table is None:  # in the first step, which no graph captures
            where = step.tokens.device
            self._table = torch.zeros(CAPACITY, len(COLUMNS), dtype=torch.int64, device=where)
            self._steps = torch.zeros(1, dtype=torch.int64, device=where)
        self._steps.add_(1)
        self._real, self._calls = real_tokens(step), 0
        self.add("tokens", step.tokens.unsqueeze(1))
        self.add("lengths", step.positions.T)

    def choose(self, sampled: torch.Tensor) -> None:
        """From now on rows are those of the tokens `sampled` [S]."""
        self._real = self._real.index_select(0, sampled)

    def add(self, column: str, x: torch.Tensor, kept: torch.Tensor | None = None) -> None:
        """Add rows [T, N, ...] of the step to a column; only those for which `kept` [T] is true, if it is given."""
        assert self._table is not None, "the first layer begins a row"
        self._calls += 1
        at = (self._steps - 1).remainder(CAPACITY) * len(COLUMNS) + list(COLUMNS).index(column)
        real = self._real if kept is None else self._real & kept
        self._table.view(-1).index_add_(0, at, checksum(x, real).view(1) * (2 * self._calls + 1))

    def save(self, path: Path) -> None:
        """Write the table. The file appears when it is complete."""
        steps, table = int(self._steps.sum()), self._table
        rows = np.zeros((0, len(COLUMNS)), np.int64) if table is None else table[:steps].cpu().numpy()
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, rows=rows, steps=steps)
        part.rename(path)


def real_tokens(step: Step) -> torch.Tensor:
    """[T] bool: false for the padding of a captured step, whose rows may differ between ranks.

    Padding is stored at the first slot of the last granule, which is that of the last request in the table.
    """
    group = next(iter(step.kv.values()))
    table = next(meta["table"] for meta in (group.mixed or {}, group.decode, group.prefill) if "table" in meta)
    slots, granule = len(next(iter(group.kv.values()))[0]), table[-1, 0].long()
    return group.slots * (granule + 1) != granule * slots


def alone(slots: torch.Tensor) -> torch.Tensor:
    """[T] bool: true for the tokens whose slot no other token of the step has.

    The steps of a start store all tokens in one granule. Which write to a slot is the last one may differ between
    ranks.
    """
    ordered, order = slots.sort()
    equal = torch.zeros(len(slots) + 1, dtype=torch.bool, device=slots.device)
    equal[1:-1] = ordered[1:] == ordered[:-1]
    found = torch.empty_like(equal[1:])
    found[order] = ~(equal[1:] | equal[:-1])
    return found


class _Route:
    """Op moe.route beside a ledger."""

    def __init__(self, route: Op, ledger: Ledger) -> None:
        self._route, self._ledger = route, ledger

    def __call__(self, *given: Any) -> Any:
        weights, experts = self._route(*given)
        self._ledger.add("router", weights)
        self._ledger.add("router", experts)
        return weights, experts


class _Observed(nn.Module):
    """The layer `inner` beside a ledger. The last one makes the sum of a Partial, as Decoder would do after it."""

    def __init__(self, inner: nn.Module, info: LayerInfo, ledger: Ledger) -> None:
        super().__init__()
        self.inner, self._ledger, self._index = inner, ledger, info.index
        self._last = info.index == info.config.num_layers - 1
        self._group = next((one for one in info.config.kv_groups if info.index in one.layers), None)
        self._routes_known = False

    def forward(self, x: Hidden, step: Step) -> Hidden:
        self._begin(step)
        y: Hidden = self.inner(x, step)
        self._stored(step)
        return self._ended(y)

    def _begin(self, step: Step) -> None:
        if not self._routes_known:  # the ops are there once the weights are
            self._routes_known = True
            for ops in (getattr(module, "_fused", ()) for module in self.inner.modules()):
                for op in ops:
                    if not isinstance(getattr(op, "_route", None), _Route | None):
                        op._route = _Route(op._route, self._ledger)
        if self._index == 0:
            self._ledger.begin(step)

    def _stored(self, step: Step) -> None:
        group = self._group
        if group is None or group.name not in step.kv:
            return
        at = step.kv[group.name]
        if pools := shared_pools(at.kv[self._index], group):
            kept = alone(at.slots)
            for tensor in pools:
                self._ledger.add("kv", tensor.view(_WORDS[tensor.itemsize]).index_select(0, at.slots), kept)

    def _ended(self, x: Hidden) -> Hidden:
        """The result of the last layer, with the sum over the ranks that Decoder would make."""
        hidden, residual = x
        if not self._last:
            return x
        if isinstance(hidden, Partial):
            hidden = hidden.sum(Rows(bucket_of(len(hidden))))
        for part in (hidden, residual):
            if part is not None:
                self._ledger.add("residual", part)
        return hidden, residual


class _ObservedHalves(_Observed):
    """The same for a layer in two parts."""

    def attend(self, x: Hidden, step: Step) -> Hidden:
        """The first part, in the last layer."""
        self._begin(step)
        y: Hidden = self.inner.attend(x, step)  # type: ignore[operator]
        self._stored(step)
        assert step.sampled is not None, "Decoder calls the parts for sampled tokens"
        self._ledger.choose(step.sampled)
        return y

    def feed(self, x: Hidden, step: Bucketed) -> Hidden:
        """The second part, for the sampled tokens."""
        return self._ended(self.inner.feed(x, step))  # type: ignore[operator]


def observe(layer: nn.Module, info: LayerInfo, ledger: Ledger) -> nn.Module:
    """The layer with its checksums in `ledger`."""
    return (_ObservedHalves if isinstance(layer, Halves) else _Observed)(layer, info, ledger)


def shared_pools(kv: Sequence[torch.Tensor], group: KVGroupSpec) -> Sequence[torch.Tensor]:
    """The pools of a layer that have all KV heads of the model on this rank; none if heads are cut."""
    return [pool for pool in kv if len(pool) == len(kv[0]) and pool.ndim > 1 and pool.shape[1] == group.kv_heads]


@dataclass(frozen=True)
class Compared:
    """A column of two or more ranks. `filled`: steps in which it has a checksum. `first`: the first step, from 1, in
    which ranks differ; None if they never do."""

    column: str
    filled: int
    mismatches: int
    first: int | None


def compare(folder: Path, ranks: int) -> tuple[int, list[Compared]]:
    """The steps, and each column's comparison, of the tables that the processes wrote into `folder`.

    Raises LlmcoreError if a rank has written none, or if ranks have different numbers of steps.
    """
    found = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            found[int(path.stem)] = int(file["steps"]), file["rows"]
    if len(found) != ranks:
        raise LlmcoreError(f"{len(found)} of {ranks} ranks wrote checksums; the others ended before")
    if len({steps for steps, _ in found.values()}) > 1:
        counts = {process: steps for process, (steps, _) in found.items()}
        raise LlmcoreError(f"ranks made different numbers of steps (process: steps): {counts}")
    lead = found.pop(os.getpid(), None) or found.popitem()[1]
    steps, own = lead
    differ = np.logical_or.reduce([rows != own for _, rows in found.values()])
    compared = []
    for column, wrong, numbers in zip(COLUMNS, differ.T, own.T, strict=True):
        (at,) = np.nonzero(wrong)
        compared.append(Compared(column, int(np.count_nonzero(numbers)), len(at), int(at[0]) + 1 if len(at) else None))
    return steps, compared
