"""WeightMap: how a checkpoint's names become a model's parameters; Shard: how a parameter is split. No torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shard:
    """A parameter is cut along `dim` over the ranks of mesh group `group`, in multiples of `multiple` elements."""

    group: str
    dim: int
    multiple: int = 1


@dataclass(frozen=True)
class Placement:
    """How checkpoint tensors fill one parameter: `parts` name -> (first row, rows) on this rank, {} if it is whole.

    `replicated`: the parts that every rank has whole although the others are cut.
    """

    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    shard: Shard | None = None
    replicated: frozenset[str] = frozenset()

    def shard_of(self, part: str | None) -> Shard | None:
        """How a part is cut; None for one that every rank has whole."""
        return None if part in self.replicated else self.shard


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes: parameter `name`, as part `part` of it (None: all of it)."""

    name: str
    part: str | None = None


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Declarative rules, tried on the last dotted components of a name.

    `rename`: prefix -> prefix, longest first. `fuse`: module -> the modules whose tensors it stacks, e.g.
    ``{"qkv_proj": ("q_proj", "k_proj", "v_proj")}``; a checkpoint may also hold the stack itself. `split`: module ->
    the modules that its tensor is cut into, the reverse, by the sizes of the receiving parts. `stack`: list of modules
    -> module of each -> (parameter of the list, part), so that ``{"experts": {"w1": ("gate_up_proj", "gate_proj")}}``
    makes ``experts.7.w1.weight`` part "7.gate_proj" of ``experts.gate_up_proj``; a checkpoint may also hold that
    parameter itself. `skip`: globs of names that are not parameters. `tie`: parameter -> parameter it shares memory
    with when the checkpoint lacks it.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    fuse: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stack: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    tie: Mapping[str, str] = field(default_factory=dict)

    def targets(self, name: str) -> tuple[Target, ...]:
        """The parameters that checkpoint tensor `name` fills, () if it is skipped."""
        if any(fnmatch.fnmatchcase(name, glob) for glob in self.skip):
            return ()
        for prefix in sorted(self.rename, key=len, reverse=True):
            if name.startswith(prefix):
                name = self.rename[prefix] + name[len(prefix) :]
                break
        head, _, leaf = name.rpartition(".")
        parent, _, module = head.rpartition(".")
        if self.stack and (stacked := self._stacked(parent, module, leaf)) is not None:
            return (stacked,)
        join = f"{parent}." if parent else ""
        for whole, parts in self.fuse.items():
            if module in parts:
                return (Target(f"{join}{whole}.{leaf}", module),)
        if module in self.split:
            return tuple(Target(f"{join}{part}.{leaf}") for part in self.split[module])
        return (Target(name),)

    def _stacked(self, parent: str, module: str, leaf: str) -> Target | None:
        above, _, index = parent.rpartition(".")
        modules = self.stack.get(above.rpartition(".")[2], {})
        if leaf != "weight" or not index.isdecimal() or module not in modules:
            return None
        parameter, part = modules[module]
        return Target(f"{above}.{parameter}", f"{index}.{part}")
