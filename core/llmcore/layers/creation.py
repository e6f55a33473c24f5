"""Create the tensors of a model's linears, whose names decide how each is quantized."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from llmcore.api.errors import ConfigError
from llmcore.layers.build import LinearMethod, Unquantized
from llmcore.layers.decoder import family_path
from llmcore.layers.linear import Linear
from llmcore.weights.map import Target, WeightMap

MethodFor = Callable[[Sequence[str]], LinearMethod | None]
"""(the checkpoint's modules of one linear) -> its LinearMethod, or None for plain weights. See QuantMethod."""

PLAIN = {"weight", "bias"}


def create_linears(
    model: nn.Module,
    method_for: MethodFor | None = None,
    *,
    names: WeightMap | None = None,
    stored: Collection[str] = (),
) -> None:
    """Create the tensors of every linear in `model`, after it was built and before weights are loaded.

    `method_for`: decides how each linear is quantized; None: all are plain. `names`: the WeightMap, from which the
    checkpoint's modules of a linear follow; None: the checkpoint has the model's names. `stored`: the names of the
    tensors in the checkpoint. Without them, the likeliest modules are used.

    Plain are linears with a LinearMethod of their own, those of which the checkpoint has no tensor, and those that
    share a weight, unless the checkpoint has quantized tensors for them.

    Raises ConfigError for a linear that cannot be cut over the ranks of its mesh group in its method's multiples.
    """
    leaves: dict[str, set[str]] = defaultdict(set)
    for name in stored:
        module, _, leaf = name.rpartition(".")
        leaves[module].add(leaf)
    found: list[tuple[str, Linear, LinearMethod | None]] = []
    for path, linear in model.named_modules():
        if not isinstance(linear, Linear):
            continue
        name = family_path(getattr(model, "wrapped", {}), path) or path
        modules = _modules(linear, name, names or WeightMap(), leaves)
        tied = linear.shape.shared is not None
        plain = tied and any(leaves.get(module, PLAIN) <= PLAIN for module in modules)
        asked = modules and linear.method is None and not plain
        method = method_for(modules) if asked and method_for is not None else None
        if tied and method is not None:
            linear.build.notes[name] = "quantized in the checkpoint, although config.json ties it to the embedding"
        found.append((name, linear, method))
    _check_cuts([cut for each in found for cut in _cuts(*each)])
    for name, linear, method in found:
        linear.create(name, method)


class _Cut(NamedTuple):
    """The outputs or inputs of a linear, which are cut over the ranks of a mesh group."""

    what: str
    group: str
    ranks: int
    total: int
    multiple: int

    def fits(self, ranks: int) -> bool:
        return self.total % (ranks * self.multiple) == 0


def _cuts(name: str, linear: Linear, method: LinearMethod | None) -> Iterator[_Cut]:
    shape, method = linear.shape, method or linear.method or Unquantized()
    if (shard := shape.shard) is None:
        return
    shares = {part: rows for part, rows in shape.parts.items() if part not in shape.replicated}
    whole = {"outputs": shape.outputs} if not shape.parts else shares
    ranks, multiple = linear.build.mesh.size(shard.group), math.lcm(shard.multiple, method.multiples[shard.dim])
    for what, share in ({"inputs": shape.inputs} if shard.dim == 1 else whole).items():
        yield _Cut(f"{what} of {name}", shard.group, ranks, share * ranks, multiple)


def _check_cuts(cuts: Sequence[_Cut]) -> None:
    """Raise ConfigError for a cut that does not fit; it names the most ranks that fit all cuts of the mesh group."""
    wrong = next((cut for cut in cuts if cut.ranks > 1 and not cut.fits(cut.ranks)), None)
    if wrong is None:
        return
    beside = [cut for cut in cuts if cut.group == wrong.group]
    most = max((ranks for ranks in range(1, wrong.ranks) if all(cut.fits(ranks) for cut in beside)), default=None)
    advice = "no --tp works" if most is None else f"the largest --tp that works is {most}"
    raise ConfigError(
        f"the {wrong.total} {wrong.what} cannot be cut over {wrong.ranks} ranks of {wrong.group} in multiples of "
        f"{wrong.multiple}, as its quantization needs; {advice}"
    )


def _modules(linear: Linear, name: str, names: WeightMap, leaves: Collection[str]) -> tuple[str, ...]:
    """The checkpoint's modules of a linear, in order; () if one is not in `leaves`, the modules of the checkpoint."""
    found: dict[str, None] = {}
    for part in linear.shape.parts or (None,):
        sources = (source.removesuffix(".weight") for source in names.sources(Target(f"{name}.weight", part)))
        module = next((module for module in sources if not leaves or module in leaves), None)
        if module is None:
            return ()
        found[module] = None
    return tuple(found)
