"""Fill a model's parameters, one tensor at a time from a checkpoint, or with random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from llmcore.api.protocols import Checkpoint
from llmcore.layers.mesh import Mesh
from llmcore.weights.fit import Fit, Piece, Shared, family_name, first_names, placements
from llmcore.weights.map import Sizes, Target, WeightMap

Progress = Callable[[int], None]
"""Called after each tensor that was read, with its size in bytes."""


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    weights: WeightMap,
    *,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> int:
    """Fill the parameters of `model` and bind its linears; returns the size of the parameters in bytes.

    Checks the headers first: one ConfigError lists missing tensors, unexpected tensors and wrong shapes. At any time
    at most one tensor is in memory beside the parameters.
    """
    mesh = mesh or Mesh()
    fit = Fit(model, checkpoint.sizes(), weights, mesh)
    shared = Shared(fit)
    for name, read in checkpoint.tensors():
        if name not in fit.pieces:
            continue
        tensor = read()
        if weights.transposes(name) and tensor.dim() > 1:
            tensor = tensor.transpose(-1, -2)
        # Drop the references at once: a linear that packs its weight can then free the plain one.
        for piece in fit.pieces.pop(name):
            part = _cut(tensor, piece, mesh)
            if piece.parameter in fit.shared:
                shared.put(name, piece, part)
            else:
                piece.into.copy_(part)
        if progress is not None:
            progress(tensor.nbytes)
        del tensor, piece, part
    total = sum(parameter.nbytes for parameter in model.parameters())
    del fit, shared
    finish(model)
    return total


def dummy_weights(model: nn.Module, seed: int = 0) -> int:
    """Fill the parameters with `fill_dummy` of their module, else with N(0, 0.02), and bind the linears.

    A parameter's numbers depend only on its name and `seed`. Returns the size of the parameters in bytes.
    """
    total = 0
    modules = dict(model.named_modules())
    for path, parameter in model.named_parameters():
        total += parameter.nbytes
        if (name := family_name(model, path)) is not None:
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()) + seed)
            fill = getattr(modules[path.rpartition(".")[0]], "fill_dummy", _normal)
            fill(parameter.data, generator)
    finish(model)
    return total


def stored_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a checkpoint has for `model`, by path; a parameter with parts has one for each."""
    found = placements(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for path, parameter in model.named_parameters():
        placement = found[family_name(model, path) or path]
        for part, (_, rows) in placement.parts.items():
            shapes[f"{path}.{part}"] = (rows, *parameter.shape[1:])
        if not placement.parts:
            shapes[path] = tuple(parameter.shape)
    return shapes


def filled_shapes(model: nn.Module, sizes: Sizes, weights: WeightMap) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint's tensors that fill a loaded `model`; of two that fill the same parameter, one."""
    first, found, taken = first_names(model), dict[str, tuple[int, ...]](), set[Target]()
    for name, shape in weights.wanted(sizes).items():
        targets = {replace(target, name=first.get(target.name, target.name)) for target in weights.targets(name)}
        if not targets <= taken:
            found[name] = shape
        taken |= targets
    return found


def finish(model: nn.Module) -> None:
    """Call `finish` of each module that has it, so that it can rearrange its loaded parameters."""
    for module in model.modules():
        if (done := getattr(module, "finish", None)) is not None:
            done()


def _normal(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.normal_(0.0, 0.02, generator=generator)


def _cut(tensor: torch.Tensor, piece: Piece, mesh: Mesh) -> torch.Tensor:
    """The part of a checkpoint tensor that fills `piece` on this rank."""
    if tensor.dim() > piece.into.dim():
        tensor = tensor.flatten(0, 1)
    if piece.rows is not None:
        tensor = tensor.narrow(0, *piece.rows)
    if (shard := piece.shard) is not None:
        size = piece.into.shape[shard.dim]
        tensor = tensor.narrow(shard.dim, mesh.rank(shard.group) * size, size)
    return tensor
