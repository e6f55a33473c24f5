"""WeightMap maps a checkpoint's names to a model's parameters; Shard splits a parameter over ranks. No torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from llmcore.api.errors import ConfigError

BUFFERS = (
    *("*rotary_emb*.inv_freq", "*rotary_emb*.original_inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached"),
    *("*.attn.bias", "*.attention.bias", "*.self_attn.bias"),
    *("*.attn.masked_bias", "*.attention.masked_bias", "*.self_attn.masked_bias"),
    *("*position_ids", "*causal_mask"),
)
"""Globs of tensors in checkpoints that models compute themselves: rotary frequencies, masks, positions."""

Sizes = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensor name -> (shape, safetensors' name of the dtype)."""


@dataclass(frozen=True)
class Shard:
    """A parameter is cut along `dim` over the ranks of mesh group `group`, in multiples of `multiple` elements.

    `repeat`: if there are fewer multiples than ranks, neighbouring ranks hold the same one.
    `pad`: all ranks have equal shares, and the last ranks hold more elements than the checkpoint has for them.
    """

    group: str
    dim: int
    multiple: int = 1
    repeat: bool = False
    pad: bool = False

    def share(self, total: int, ranks: int) -> int | None:
        """The number of elements of `total` that one rank holds; None if `ranks` ranks cannot share them."""
        if self.pad:
            return -(-total // (ranks * self.multiple)) * self.multiple
        pieces, rest = divmod(total, self.multiple)
        if self.repeat and not rest and 0 < pieces < ranks:
            return None if ranks % pieces else self.multiple
        return None if rest or pieces % ranks else total // ranks

    def held(self, total: int, share: int, rank: int, ranks: int) -> tuple[int, int]:
        """(first, number) of the elements of `total` that fill the `share` of `rank`; the rest of it is padding."""
        copies = share * ranks // total if self.repeat else 1
        first = min(share * (rank // copies), total)
        return first, min(share, total - first)


@dataclass(frozen=True)
class Placement:
    """Says how checkpoint tensors fill one parameter.

    `parts`: name of a part -> (first row, number of rows) on this rank; {} if one tensor fills the whole parameter.
    `shard`: the cut over the ranks. `replicated`: the parts that every rank has whole although the others are cut.
    `totals`: part ("": the only one) -> its elements over all ranks, along the dimension of the cut, or along the
      first without a cut; parts that are missing have this rank's elements times the ranks that cut them.
    `by_output`: each row belongs to one output of a linear. A parameter without rows of outputs is the same in
      whatever order the outputs are; the one tensor of a checkpoint that has stacked the parts fills each part whole.
    """

    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    shard: Shard | None = None
    replicated: frozenset[str] = frozenset()
    by_output: bool = True
    totals: Mapping[str, int] = field(default_factory=dict)

    def shard_of(self, part: str | None) -> Shard | None:
        """The shard of a part; None for a part that every rank has whole."""
        return None if part in self.replicated else self.shard


@dataclass(frozen=True)
class Target:
    """The destination of a checkpoint tensor: part `part` (None: all) of parameter `name`."""

    name: str
    part: str | None = None


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Declarative rules, listed here in the order in which they apply to the name of a checkpoint tensor.

    `skip`: globs of names that are not parameters. `BUFFERS` are skipped without a rule.
    `transpose`: globs of names whose last two dimensions are swapped, for linears saved as [inputs, outputs]. A method
      that quantizes weights sees them swapped. A format of quantized weights defines its own tensors.
    `rename`: start of the name -> new start. The longest start that matches applies.
    `suffix`: end of the name or of its module's path, in whole components -> new end. The longest end that matches
      applies. Example: ``{"attn.c_proj": "self_attn.o_proj"}``.
    `stack`: list of modules -> module in each -> (parameter of the list, part). Example: ``{"experts": {"w1":
      ("gate_up_proj", "gate_proj")}}`` makes ``experts.7.w1.weight`` part "7.gate_proj" of ``experts.gate_up_proj``.
      A checkpoint may also hold that parameter itself. Tensors of another name have a stack of their own:
      ``experts.7.w1.scale`` is part of ``experts.gate_up_proj_scale``.
    `fuse`: module -> the modules whose tensors it stacks. Example: ``{"qkv_proj": ("q_proj", "k_proj", "v_proj")}``.
      A checkpoint may also hold the stack itself.
    `split`: the reverse of `fuse`: module -> the modules that share the rows of its tensor, by their sizes.
    `tie`: parameter -> the parameter that it shares memory with if the checkpoint lacks it.

    Raises ConfigError for a key with a dot where a rule takes the name of one module, and for a string where a rule
    takes several names.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    suffix: Mapping[str, str] = field(default_factory=dict)
    fuse: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stack: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=dict)
    transpose: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    tie: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        several = [("skip", self.skip), ("transpose", self.transpose), *self.fuse.items(), *self.split.items()]
        for where, value in several:
            if isinstance(value, str):
                raise ConfigError(
                    f"WeightMap: {where} takes several names, and {value!r} is one text; the author of the family can "
                    f"write ({value!r},)"
                )
        single: Mapping[str, Iterable[str]] = {
            "fuse": (name for whole, parts in self.fuse.items() for name in (whole, *parts)),
            "split": self.split,
            "stack": (name for whole, modules in self.stack.items() for name in (whole, *modules)),
        }
        for rule, names in single.items():
            if dotted := next((name for name in names if "." in name), None):
                raise ConfigError(
                    f"WeightMap: {rule} takes the names of single modules, and {dotted!r} has a dot, so that it would "
                    f"match nothing; the author of the family can rename it first: suffix={{{dotted!r}: ...}}"
                )

    def targets(self, name: str) -> tuple[Target, ...]:
        """The parameters that checkpoint tensor `name` fills, () if it is skipped."""
        if _meets(name, self.skip):
            return ()
        plain = self._renamed(name)
        name = next(iter(_swapped_ends(plain, self.suffix)), plain)
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
        return () if name == plain and _meets(name, BUFFERS) else (Target(name),)

    def transposes(self, name: str) -> bool:
        """True if the last two dimensions of checkpoint tensor `name` are swapped."""
        return _meets(name, self.transpose)

    def sources(self, target: Target) -> Iterator[str]:
        """The names that a checkpoint may use for the tensor that fills `target`, the likeliest first."""
        for name in self._unjoined(target):
            for plain in (*_swapped_ends(name, {new: old for old, new in self.suffix.items()}), name):
                for whole in self._unrenamed(plain):
                    if any(t.name == target.name and t.part in (target.part, None) for t in self.targets(whole)):
                        yield whole

    def idle(self, names: Collection[str]) -> list[str]:
        """The rules of `suffix` and `transpose` that match none of a checkpoint's names, probably misspelt.

        A module that is quantized has no tensor `weight`, and a rule may match the name that this would have.
        """
        plain = [self._renamed(name) for name in names]
        weights = {f"{name.rpartition('.')[0]}.weight" for name in names}
        ends = [end for end in self.suffix if not any(_swapped_ends(name, {end: ""}) for name in plain)]
        globs = [glob for glob in self.transpose if not any(_meets(name, (glob,)) for name in weights.union(names))]
        return [f"suffix {end!r}" for end in ends] + [f"transpose {glob!r}" for glob in globs]

    def idle_starts(self, names: Collection[str]) -> list[str]:
        """The rules of `rename` that match none of a checkpoint's names, which alone is not an error."""
        return [f"rename {start!r}" for start in self.rename if not any(name.startswith(start) for name in names)]

    def _renamed(self, name: str) -> str:
        for prefix in sorted(self.rename, key=len, reverse=True):
            if name.startswith(prefix):
                return self.rename[prefix] + name[len(prefix) :]
        return name

    def _stacked(self, parent: str, module: str, leaf: str) -> Target | None:
        above, _, index = parent.rpartition(".")
        modules = self.stack.get(above.rpartition(".")[2], {})
        if not index.isdecimal() or module not in modules:
            return None
        parameter, part = modules[module]
        return Target(f"{above}.{_stacked_leaf(parameter, leaf)}", f"{index}.{part}")

    def _unjoined(self, target: Target) -> Iterator[str]:
        """The names that `stack`, `fuse` and `split` turn into `target`, and its own name last."""
        head, _, leaf = target.name.rpartition(".")
        parent, _, module = head.rpartition(".")
        join = f"{parent}." if parent else ""
        if target.part is not None:
            index, _, part = target.part.partition(".")
            for name, (parameter, own) in self.stack.get(module, {}).items():
                inside = leaf.removeprefix(f"{parameter}_") if leaf != parameter else "weight"
                if own == part and _stacked_leaf(parameter, inside) == leaf:
                    yield f"{head}.{index}.{name}.{inside}"
            if target.part in self.fuse.get(module, ()):
                yield f"{join}{target.part}.{leaf}"
        for whole, parts in self.split.items():
            for made in parts:
                if head == made or head.endswith(f".{made}"):
                    yield f"{head.removesuffix(made)}{whole}.{leaf}"
        yield target.name

    def _unrenamed(self, name: str) -> Iterator[str]:
        """The names that `rename` turns into `name`. Rules whose new start is empty fit every name: they come last."""
        starts = sorted(self.rename.items(), key=lambda rule: len(rule[1]), reverse=True)
        yield from (old + name.removeprefix(new) for old, new in starts if new and name.startswith(new))
        yield name
        yield from (old + name for old, new in starts if not new)


def _stacked_leaf(parameter: str, leaf: str) -> str:
    """The name of the stack of a module's tensors `leaf`, whose weights are stacked in `parameter`."""
    return parameter if leaf == "weight" else f"{parameter}_{leaf}"


def _meets(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _swapped_ends(name: str, ends: Mapping[str, str]) -> list[str]:
    """`name` with each matching end, of itself or of its module's path, replaced as `ends` says, the longest first."""
    head, _, leaf = name.rpartition(".")
    return [
        path.removesuffix(end) + ends[end] + rest
        for end in sorted(ends, key=len, reverse=True)
        for path, rest in ((name, ""), (head, f".{leaf}"))
        if path == end or path.endswith(f".{end}")
    ]
