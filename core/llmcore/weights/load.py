"""Filling a model: one tensor at a time from a checkpoint, or with random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from llmcore.errors import ConfigError
from llmcore.layers.mesh import Mesh
from llmcore.protocols import Checkpoint
from llmcore.weights.map import Placement, Shard, Target, WeightMap

Progress = Callable[[int], None]
"""Called with the bytes of each tensor that was read."""


@dataclass(frozen=True)
class _Piece:
    """Rows `first` to `first + rows` of a checkpoint tensor (all of it if None) fill `into`, cut by `shard`."""

    into: torch.Tensor
    rows: tuple[int, int] | None
    shard: Shard | None


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    weights: WeightMap,
    *,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> int:
    """Fill the parameters of `model` and bind its linears; returns bytes of parameters.

    Everything is checked from the headers first: one ConfigError lists what is missing, what nothing wants, and
    what has the wrong shape. Beside the parameters themselves no more than one tensor is held.
    """
    mesh = mesh or Mesh()
    pieces, total = _pieces(model, checkpoint, weights, mesh)
    for name, read in checkpoint.tensors():
        if name not in pieces:
            continue
        tensor = read()
        # what was filled is let go of at once: a linear that packs its weight frees the plain one
        for piece in pieces.pop(name):
            piece.into.copy_(_cut(tensor, piece, mesh))
        if progress is not None:
            progress(tensor.nbytes)
        del tensor, piece
    finish(model)
    return total


def dummy_weights(model: nn.Module, seed: int = 0) -> int:
    """Fill the parameters from N(0, 0.02), or as their module's `fill_dummy` says, and bind the linears.

    The numbers of a parameter depend on its name and `seed` alone. Returns bytes of parameters.
    """
    total = 0
    modules = dict(model.named_modules())
    for path, parameter in model.named_parameters():
        total += parameter.nbytes
        if (name := _family_name(model, path)) is not None:
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()) + seed)
            fill = getattr(modules[path.rpartition(".")[0]], "fill_dummy", _normal)
            fill(parameter.data, generator)
    finish(model)
    return total


def stored_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a checkpoint has for `model`: what is filled in parts is counted by them."""
    placements = dict(_placements(model))
    shapes: dict[str, tuple[int, ...]] = {}
    for path, parameter in model.named_parameters():
        placement = placements.get(_family_name(model, path) or path, _WHOLE)
        for part, (_, rows) in placement.parts.items():
            shapes[f"{path}.{part}"] = (rows, *parameter.shape[1:])
        if not placement.parts:
            shapes[path] = tuple(parameter.shape)
    return shapes


def finish(model: nn.Module) -> None:
    """Let every module that wants it arrange what was loaded."""
    for module in model.modules():
        if (done := getattr(module, "finish", None)) is not None:
            done()


def _normal(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.normal_(0.0, 0.02, generator=generator)


def _family_name(model: nn.Module, path: str) -> str | None:
    """What the family calls a parameter, in whatever plugins wrapped its block; None if it is a wrapper's own."""
    wrapped: Mapping[str, str] = getattr(model, "wrapped", {})
    block = ".".join(path.split(".")[:2])
    if block not in wrapped:
        return path
    inside = f"{wrapped[block]}."
    return f"{block}.{path.removeprefix(inside)}" if path.startswith(inside) else None


# --- the plan --------------------------------------------------------------------------------------------------


def _pieces(
    model: nn.Module, checkpoint: Checkpoint, weights: WeightMap, mesh: Mesh
) -> tuple[dict[str, list[_Piece]], int]:
    """What each checkpoint tensor fills, and bytes of parameters; ConfigError if they do not fit."""
    plan = _Plan(model, mesh)
    for name, (shape, _) in checkpoint.sizes().items():
        plan.add(name, shape, weights.targets(name))
    plan.tie(weights.tie)
    plan.check()
    return plan.pieces, sum(parameter.nbytes for parameter in model.parameters())


class _Plan:
    """Which tensor fills what, worked out from names and shapes."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        self.pieces: dict[str, list[_Piece]] = {}
        self.paths = {_family_name(model, path): path for path, _ in model.named_parameters()}
        self.paths.pop(None, None)
        self.parameters = {name: model.get_parameter(path).data for name, path in self.paths.items() if name}
        self.placements = dict(_placements(model))
        self.elsewhere: Callable[[str], bool] = getattr(model, "elsewhere", lambda name: False)
        self.lacking = {(name, part) for name in self.parameters for part in self._placement(name).parts or (None,)}
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []

    def add(self, name: str, shape: tuple[int, ...], targets: tuple[Target, ...]) -> None:
        """Take checkpoint tensor `name`; several targets cut it along its rows, in order."""
        if not targets or any(self.elsewhere(target.name) for target in targets):
            return
        parts = tuple(part for target in targets for part in self._parts(target))
        # matrices that the checkpoint stacked itself may lie along a dimension of their own
        flat = shape if parts == targets or len(shape) < 2 else (shape[0] * shape[1], *shape[2:])
        targets = parts
        pieces, first = [], 0
        for target in targets:
            into = self._part(target)
            if into is None:
                self.unexpected.append(name)
                return
            shard = self._placement(target.name).shard_of(target.part)
            wanted = _whole(into, shard, self.mesh)
            rows = None if len(targets) == 1 else (first, wanted[0])
            pieces.append(_Piece(into, rows, shard))
            first += 0 if rows is None else wanted[0]
            self.lacking.discard((target.name, target.part))
        needed = wanted if len(targets) == 1 else (first, *wanted[1:])
        if needed not in (shape, flat):
            self.mismatched.append(f"{name} is {list(shape)}, {targets[0].name} needs {list(needed)}")
            return
        self.pieces[name] = pieces

    def tie(self, rules: Mapping[str, str]) -> None:
        """Let parameters that the checkpoint lacks share memory with others, as the family allows."""
        for name, source in rules.items():
            if (name, None) in self.lacking and source in self.parameters:
                module, _, leaf = self.paths[name].rpartition(".")
                setattr(self.model.get_submodule(module), leaf, self.model.get_parameter(self.paths[source]))
                self.lacking.discard((name, None))

    def check(self) -> None:
        """One ConfigError with everything that does not match."""
        missing = sorted(name if part is None else f"{part} of {name}" for name, part in self.lacking)
        problems = [
            f"{what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
            for what, names in (
                ("missing", missing),
                ("unexpected", self.unexpected),
                ("of the wrong shape", self.mismatched),
            )
            if names
        ]
        if problems:
            raise ConfigError(
                f"the checkpoint does not fit the model; {'; '.join(problems)}. "
                f"Check that config.json and the weights belong together; the author of a family, that its WeightMap "
                f"makes the second of the first"
            )

    def _placement(self, name: str) -> Placement:
        return self.placements.get(name, _WHOLE)

    def _parts(self, target: Target) -> tuple[Target, ...]:
        """A checkpoint that stacked the parts itself fills each of them: every one is cut over the ranks by itself."""
        parts = self._placement(target.name).parts if target.part is None else ()
        return tuple(Target(target.name, part) for part in parts) or (target,)

    def _part(self, target: Target) -> torch.Tensor | None:
        into, parts = self.parameters.get(target.name), self._placement(target.name).parts
        if into is None or target.part is None:
            return into
        return into.narrow(0, *parts[target.part]) if target.part in parts else None


_WHOLE = Placement()


def _placements(model: nn.Module) -> Iterator[tuple[str, Placement]]:
    for prefix, module in model.named_modules():
        for leaf, placement in getattr(module, "placements", {}).items():
            if (name := _family_name(model, f"{prefix}.{leaf}" if prefix else leaf)) is not None:
                yield name, placement


def _whole(into: torch.Tensor, shard: Shard | None, mesh: Mesh) -> tuple[int, ...]:
    """Shape of what `into` is this rank's part of."""
    shape = list(into.shape)
    if shard is not None:
        shape[shard.dim] *= mesh.size(shard.group)
    return tuple(shape)


def _cut(tensor: torch.Tensor, piece: _Piece, mesh: Mesh) -> torch.Tensor:
    """The part of a checkpoint tensor that fills a piece on this rank."""
    if tensor.dim() > piece.into.dim():
        tensor = tensor.flatten(0, 1)
    if piece.rows is not None:
        tensor = tensor.narrow(0, *piece.rows)
    if (shard := piece.shard) is not None:
        size = piece.into.shape[shard.dim]
        tensor = tensor.narrow(shard.dim, mesh.rank(shard.group) * size, size)
    return tensor
