"""Fill a model's parameters, one tensor at a time from a checkpoint, or with random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from llmcore.api.protocols import Checkpoint
from llmcore.layers.build import fill_normal
from llmcore.layers.linear import Linear
from llmcore.layers.mesh import Mesh
from llmcore.layers.moe import Experts
from llmcore.weights.fit import Fit, Piece, Shared, family_name
from llmcore.weights.map import Placement, WeightMap

Progress = Callable[[int], None]
"""Called after each tensor that was read, with its size in bytes."""


@dataclass(frozen=True)
class Weighed:
    """The parameters of a model on one rank, counted.

    `parameters`: the numbers that they stand for. Quantized linears and experts count as many as plain ones.
    `bytes`: what they take. `tensors`: the tensors of a checkpoint that fill them, one for each part.
    `rows`: the numbers of rows of these tensors, as far as they are matrices.
    """

    parameters: int
    bytes: int
    tensors: int
    rows: frozenset[int]


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    weights: WeightMap,
    *,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> Weighed:
    """Fill the parameters of `model`, whose linears are created, and bind its linears; returns what was filled.

    Checks the headers first: one ConfigError lists missing tensors, unexpected tensors and wrong shapes. At any time
    at most one tensor is in memory beside the parameters.
    """
    fit = Fit(model, checkpoint, weights, mesh or Mesh())
    shared = Shared(fit)
    for name, read in checkpoint.tensors():
        if name not in fit.pieces:
            continue
        tensor = read()
        # Drop the references at once: a linear that packs its weight can then free the plain one.
        for piece in fit.pieces.pop(name):
            part = _cut(tensor, piece)
            if piece.parameter in fit.shared:
                shared.put(name, piece, part)
            else:
                piece.into.copy_(part)
        if progress is not None:
            progress(tensor.nbytes)
        del tensor, piece, part
    weighed = weigh(model)
    del fit, shared
    finish(model)
    return weighed


def dummy_weights(model: nn.Module, seed: int = 0) -> Weighed:
    """Fill the parameters with `fill_dummy` of their module, else with N(0, 0.02), and bind the linears.

    A parameter's numbers depend only on its name and `seed`. Returns what was filled.
    """
    modules = dict(model.named_modules())
    for path, parameter in model.named_parameters():
        if (name := family_name(model, path)) is not None:
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()) + seed)
            module, _, leaf = path.rpartition(".")
            getattr(modules[module], "fill_dummy", fill_normal)(leaf, parameter.data, generator)
    weighed = weigh(model)
    finish(model)
    return weighed


def weigh(model: nn.Module) -> Weighed:
    """Count the parameters of a model whose linears are created and not yet bound. A shared one counts once."""
    parameters, size, seen, rows = 0, 0, set[nn.Parameter](), list[int | None]()
    for module in model.modules():
        own = {leaf: tensor for leaf, tensor in module.named_parameters(recurse=False) if tensor not in seen}
        seen.update(own.values())
        size += sum(tensor.nbytes for tensor in own.values())
        counted = own
        if isinstance(module, Linear | Experts) and own.keys() - {"bias"}:
            parameters += module.numbers
            counted = {"bias": own["bias"]} if "bias" in own else {}
        parameters += sum(tensor.numel() for tensor in counted.values())
        for leaf, tensor in own.items():
            placement: Placement = getattr(module, "placements", {}).get(leaf, Placement())
            parts = [count for _, count in placement.parts.values()] or list(tensor.shape[:1])
            rows += [count if tensor.dim() == 2 else None for count in parts]
    return Weighed(parameters, size, len(rows), frozenset(count for count in rows if count is not None))


def finish(model: nn.Module) -> None:
    """Call `finish` of each module that has it, so that it can rearrange its loaded parameters."""
    for module in model.modules():
        if (done := getattr(module, "finish", None)) is not None:
            done()


def _cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a checkpoint tensor that fills `piece` on this rank."""
    if tensor.dim() > piece.into.dim():
        tensor = tensor.flatten(0, 1)
    if piece.rows is not None:
        tensor = tensor.narrow(0, *piece.rows)
    cut = piece.cut
    return tensor if cut.length == cut.total else tensor.narrow(cut.dim, cut.first, cut.length)
