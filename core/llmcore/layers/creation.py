"""Create the tensors of a model's linears, whose names decide how each is quantized."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from torch import nn

from llmcore.layers.build import LinearMethod
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
    """
    leaves: dict[str, set[str]] = defaultdict(set)
    for name in stored:
        module, _, leaf = name.rpartition(".")
        leaves[module].add(leaf)
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
        linear.create(name, method)


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
