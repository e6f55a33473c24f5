"""Create the tensors of a model's linears and experts, whose names decide how each is quantized."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import nn

from llmcore.api.errors import ConfigError
from llmcore.layers.build import Build, LinearMethod, LinearShape, Unquantized
from llmcore.layers.decoder import family_path
from llmcore.layers.linear import Linear
from llmcore.layers.mesh import MOST_RANKS, choices
from llmcore.layers.moe import ExpertMethod, MoE, PlainExperts
from llmcore.weights.map import Shard, Target, WeightMap

MethodFor = Callable[[Sequence[str]], LinearMethod | None]
"""(the checkpoint's modules of one linear) -> its LinearMethod, or None for plain weights. See QuantMethod."""

ExpertsFor = Callable[[Sequence[str]], ExpertMethod | None]
"""(the checkpoint's modules of one mixture's experts) -> their ExpertMethod, or None for plain weights."""

PLAIN = {"weight", "bias"}


def create_linears(
    model: nn.Module,
    method_for: MethodFor | None = None,
    experts_for: ExpertsFor | None = None,
    *,
    names: WeightMap | None = None,
    stored: Collection[str] = (),
) -> None:
    """Create the tensors of every linear and of all experts in `model`, which is built, before weights are loaded.

    `method_for`, `experts_for`: decide how each linear and the experts of each mixture are quantized; None: all are
    plain. `names`: the WeightMap, from which the checkpoint's modules follow; None: the checkpoint has the model's
    names. `stored`: the names of the tensors in the checkpoint. Without them, the likeliest modules are used.

    Plain are linears with a LinearMethod of their own, those of which the checkpoint has no tensor, and those that
    share a weight, unless the checkpoint has quantized tensors for them. Experts that the checkpoint has stacked are
    plain too.

    Raises ConfigError for a linear that cannot be cut over the ranks of its mesh group in its method's multiples.
    """
    leaves: dict[str, set[str]] = defaultdict(set)
    for name in stored:
        module, _, leaf = name.rpartition(".")
        leaves[module].add(leaf)
    names, wrapped = names or WeightMap(), getattr(model, "wrapped", {})
    named = [(family_path(wrapped, path) or path, module) for path, module in model.named_modules()]
    places = {module: name for name, module in named}
    cuts, creations, mixtures = list[_Cut](), list[Callable[[], None]](), list[Callable[[], None]]()
    for name, module in named:
        if isinstance(module, Linear):
            method = _linear_method(name, module, method_for, names, leaves)
            if any(_wrapped_between(wrapped, name, places.get(source)) for source in module.sources):
                module.read(None)
            cuts += _cuts(module.build, name, module.shape, (method or module.method or Unquantized()).multiples)
            creations.append(partial(module.create, name, method))
        elif isinstance(module, MoE):
            experts = _expert_method(name, module, experts_for, names, leaves)
            for stack in module.experts.shape.stacks.values():
                cuts += _cuts(module.experts.build, name, stack, (experts or PlainExperts()).multiples)
            mixtures.append(partial(module.create, name, experts))
    _check_cuts(cuts)
    for create in (*creations, *mixtures):  # a mixture asks which of its linears are plain
        create()


def _linear_method(
    name: str, linear: Linear, method_for: MethodFor | None, names: WeightMap, leaves: Mapping[str, set[str]]
) -> LinearMethod | None:
    """The method by which a linear is quantized in the checkpoint; None if it is plain, or has a method of its own."""
    if method_for is None or linear.method is not None:
        return None
    modules = _modules((Target(f"{name}.weight", part) for part in linear.shape.parts or (None,)), names, leaves)
    tied = linear.shape.shared is not None
    if not modules or (tied and any(leaves.get(module, PLAIN) <= PLAIN for module in modules)):
        return None
    method = method_for(modules)
    if tied and method is not None:
        linear.build.notes[name] = "quantized in the checkpoint, although config.json ties it to the embedding"
    return method


def _expert_method(
    name: str, moe: MoE, experts_for: ExpertsFor | None, names: WeightMap, leaves: Mapping[str, set[str]]
) -> ExpertMethod | None:
    """The method by which the experts of a mixture are quantized in the checkpoint; None if they are plain."""
    if experts_for is None:
        return None
    stacks = moe.experts.shape.stacks.items()
    targets = (Target(f"{name}.experts.{leaf}", part) for leaf, stack in stacks for part in stack.parts)
    modules = _modules(targets, names, leaves)
    return experts_for(modules) if modules else None


def _wrapped_between(wrapped: Collection[str], linear: str, source: str | None) -> bool:
    """True if a plugin's wrapper passes what the source gives to the linear, or took the source out of the model."""
    return source is None or any(_within(linear, path) != _within(source, path) for path in wrapped)


def _within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


class _Cut(NamedTuple):
    """The outputs or inputs of a linear, which are cut over the ranks of a mesh group."""

    what: str
    shard: Shard
    ranks: int
    total: int
    multiple: int
    """What the LinearMethod asks for, beside the multiple of the shard."""

    def fits(self, ranks: int) -> bool:
        share = self.shard.share(self.total, ranks)
        return share is not None and share % self.multiple == 0


def _cuts(build: Build, name: str, shape: LinearShape, multiples: tuple[int, int]) -> Iterator[_Cut]:
    if (shard := shape.shard) is None:
        return
    parts = {part: rows for part, rows in shape.parts.items() if part not in shape.replicated}
    outputs = parts if shape.parts else {"": shape.outputs}
    ranks, totals = build.mesh.size(shard.group), shape.totals if shard.dim == 0 else {}
    for part, share in (outputs if shard.dim == 0 else {"": shape.inputs}).items():
        what = part or ("outputs" if shard.dim == 0 else "inputs")
        yield _Cut(f"{what} of {name}", shard, ranks, totals.get(part, share * ranks), multiples[shard.dim])


def _check_cuts(cuts: Sequence[_Cut]) -> None:
    """Raise ConfigError for a cut that does not fit; it lists the ranks that fit all cuts of the mesh group."""
    wrong = next((cut for cut in cuts if cut.ranks > 1 and not cut.fits(cut.ranks)), None)
    if wrong is None:
        return
    beside = [cut for cut in cuts if cut.shard.group == wrong.shard.group]
    works = [ranks for ranks in range(1, MOST_RANKS + 1) if all(cut.fits(ranks) for cut in beside)]
    multiple = math.lcm(wrong.shard.multiple, wrong.multiple)
    raise ConfigError(
        f"the {wrong.total} {wrong.what} cannot be cut over {wrong.ranks} ranks of {wrong.shard.group} in multiples "
        f"of {multiple}, as its quantization needs; {choices(works)}"
    )


def _modules(targets: Iterable[Target], names: WeightMap, leaves: Collection[str]) -> tuple[str, ...]:
    """The modules whose weights fill `targets`, in order; () if one is not in `leaves`, the checkpoint's modules."""
    found: dict[str, None] = {}
    for target in targets:
        sources = (source.removesuffix(".weight") for source in names.sources(target))
        module = next((module for module in sources if not leaves or module in leaves), None)
        if module is None:
            return ()
        found[module] = None
    return tuple(found)
