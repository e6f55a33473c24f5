"""Match checkpoint tensors with a model's parameters, by names and shapes, before any tensor is read."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn

from llmcore.api.errors import ConfigError
from llmcore.api.protocols import Checkpoint
from llmcore.layers.decoder import family_path
from llmcore.layers.mesh import Mesh
from llmcore.weights.map import Placement, Sizes, Target, WeightMap

logger = logging.getLogger(__name__)

LISTED = 8
"""Most names that an error lists for each kind of problem."""
COMPARED = 1 << 24
"""Number of elements compared at a time, so that their copy on the device stays small."""


@dataclass(frozen=True)
class Cut:
    """The part of a checkpoint tensor that fills the parameter of one rank: `length` elements from `first` on, of
    `total` along dimension `dim`. The parameter may be longer."""

    dim: int
    total: int
    first: int
    length: int

    @staticmethod
    def of(into: torch.Tensor, part: str | None, placement: Placement, mesh: Mesh) -> Cut:
        """The cut of the tensor that fills `into`, which is `part` of a parameter."""
        shard = placement.shard_of(part)
        if shard is None:
            total = placement.totals.get(part or "", len(into)) if into.dim() else 1
            return Cut(0, total, 0, total)
        share, ranks = into.shape[shard.dim], mesh.size(shard.group)
        total = placement.totals.get(part or "", share * ranks)
        return Cut(shard.dim, total, *shard.held(total, share, mesh.rank(shard.group), ranks))

    def whole(self, into: torch.Tensor) -> tuple[int, ...]:
        """The shape of the checkpoint tensor."""
        shape = list(into.shape)
        if shape:
            shape[self.dim] = self.total
        return tuple(shape)

    def filled(self, into: torch.Tensor) -> torch.Tensor:
        """The part of `into` that is filled. The rest of it is padding, and becomes zeros."""
        if not into.dim() or self.length == into.shape[self.dim]:
            return into
        into.narrow(self.dim, self.length, into.shape[self.dim] - self.length).zero_()
        return into.narrow(self.dim, 0, self.length)


@dataclass(frozen=True)
class Piece:
    """A parameter, or a part of it, that rows of one checkpoint tensor fill."""

    parameter: str
    """The family's name of the parameter."""
    into: torch.Tensor
    """The memory to fill: the parameter, or rows of it."""
    rows: tuple[int, int] | None
    """(first row, number of rows) of the checkpoint tensor; None: all of it."""
    cut: Cut
    """The part of these rows that belongs to this rank."""


class Fit:
    """The pieces that each checkpoint tensor fills.

    First ties or unties parameters that modules share, depending on the names in the checkpoint. Raises one
    ConfigError that lists everything that does not match.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, weights: WeightMap, mesh: Mesh) -> None:
        self.model, self.weights, self.mesh = model, weights, mesh
        sizes = checkpoint.sizes()
        self.elsewhere = _elsewhere(model)
        targets = {name: weights.targets(name) for name in sizes}
        paths = parameter_paths(model)
        filled = {target.name for found in targets.values() for target in found}
        self.paths = parameter_paths(model) if tie(model, weights, filled) else paths
        self.first = first_names(model)
        self.parameters = {name: model.get_parameter(path).data for name, path in self.paths.items()}
        self.placements = placements(model)
        self.pieces: dict[str, list[Piece]] = {}
        counted = Counter(self.first.values())
        self.shared = {name for name, first in self.first.items() if counted[first] > 1}
        self.lacking = {
            (name, part) for name in self.first.values() for part in self.placements[name].parts or (None,)
        }
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []
        for name, (shape, _) in sizes.items():
            self._add(name, shape, targets[name])
        idle = _zero_biases(checkpoint, self.unexpected)
        self.unexpected = [name for name in self.unexpected if name not in idle]
        self._check(sizes)

    def _add(self, name: str, shape: tuple[int, ...], targets: tuple[Target, ...]) -> None:
        """Add the pieces of checkpoint tensor `name`. Several targets share its rows, in order."""
        if not targets or any(self.elsewhere(target.name) for target in targets):
            return
        parts = tuple(part for target in targets for part in self._parts(target))
        # A checkpoint that stacks matrices itself may have an extra first dimension for them.
        flat = shape if parts == targets or len(shape) < 2 else (shape[0] * shape[1], *shape[2:])
        targets = parts
        pieces, first = [], 0
        for target in targets:
            into, placement = self._part(target), self.placements[target.name]
            if into is None:
                self.unexpected.append(name)
                return
            cut = Cut.of(into, target.part, placement, self.mesh)
            wanted = cut.whole(into)
            rows = (first, wanted[0]) if placement.by_output and len(targets) > 1 else None
            pieces.append(Piece(target.name, cut.filled(into), rows, cut))
            first += 0 if rows is None else wanted[0]
            self.lacking.discard((self.first[target.name], target.part))
        needed = wanted if rows is None else (first, *wanted[1:])
        if needed not in (shape, flat):
            self.mismatched.append(f"{name} is {list(shape)}, {targets[0].name} needs {list(needed)}")
            return
        self.pieces[name] = pieces

    def _check(self, sizes: Sizes) -> None:
        """Raise one ConfigError that lists everything that does not match."""
        missing, idle = self._missing(sizes), self.weights.idle(sizes)
        if missing or self.unexpected:
            idle += self.weights.idle_starts(sizes)
        problems = [
            f"{what}: {', '.join(names[:LISTED])}{f' and {len(names) - LISTED} more' if len(names) > LISTED else ''}"
            for what, names in (
                ("missing", missing),
                ("unexpected", self.unexpected),
                ("of the wrong shape", self.mismatched),
                ("rules of the WeightMap that no name meets", idle),
            )
            if names
        ]
        if problems:
            raise ConfigError(
                f"the checkpoint does not fit the model; {'; '.join(problems)}. "
                "Check that config.json belongs to the weights, that every file is there, and that the model is not "
                "of a variant with further parts, which this family does not compute. The author of a family: "
                "WeightMap has to turn the names in the file into those of the modules; `skip` drops a tensor"
            )

    def _missing(self, sizes: Sizes) -> list[str]:
        """The parameters that no tensor fills, by the names that this checkpoint would likely have for them."""
        alike = {_any_layer(name) for name in sizes}
        found = []
        for name, part in self.lacking:
            named = list(self.weights.sources(Target(name, part)))
            likely = [source for source in named if _any_layer(source) in alike] or named
            found.append(likely[0] if likely else name if part is None else f"{part} of {name}")
        return sorted(set(found))

    def _parts(self, target: Target) -> tuple[Target, ...]:
        """A target for each part of a parameter that one tensor fills; else `target` itself.

        The ranks cut each part separately.
        """
        parts = self.placements[target.name].parts if target.part is None else ()
        return tuple(Target(target.name, part) for part in parts) or (target,)

    def _part(self, target: Target) -> torch.Tensor | None:
        into, parts = self.parameters.get(target.name), self.placements[target.name].parts
        if into is None or target.part is None:
            return into
        return into.narrow(0, *parts[target.part]) if target.part in parts else None


class Shared:
    """Parameters that two modules share, such as the head and the embedding of a model with tied embeddings.

    If the checkpoint has a tensor for each module and the tensors are equal, the modules go on sharing one parameter.
    If the tensors differ, each module gets its own.
    """

    def __init__(self, fit: Fit) -> None:
        self._model, self._paths, self._first = fit.model, fit.paths, fit.first
        self._filled: dict[tuple[str, int], str] = {}

    def put(self, source: str, piece: Piece, part: torch.Tensor) -> None:
        """Fill `piece` with `part`, which comes from checkpoint tensor `source`."""
        first = self._first[piece.parameter]
        other = self._filled.setdefault((first, int(piece.into.storage_offset())), source)
        if other == source:
            piece.into.copy_(part)
        elif not _equal(piece.into, part):
            self._separate(first, piece, part)
            logger.warning(
                "%s and %s differ in the checkpoint, although the model's config ties them (tie_word_embeddings); "
                "each is used as the checkpoint has it.",
                other,
                source,
            )

    def _separate(self, first: str, piece: Piece, part: torch.Tensor) -> None:
        """Give one of the two modules a parameter of its own.

        Linears bind their weight, so it is the module without `share`, which reads its parameter in every call.
        """
        sharing = [name for name, other in self._first.items() if other == first]
        owners = {name: _owner(self._model, self._paths[name]) for name in sharing}
        free = [name for name, (module, _) in owners.items() if not hasattr(module, "share")]
        if len(sharing) != 2 or len({module for module, _ in owners.values()}) != 2 or not free:
            raise ConfigError(
                f"{', '.join(sharing)} share one parameter, and the checkpoint has different tensors for them; the "
                f"author of the family has to build modules that do not share"
            )
        module, leaf = owners[free[0]]
        mine = free[0] == piece.parameter
        own = part.to(piece.into.device, piece.into.dtype, copy=True) if mine else piece.into.clone()
        setattr(module, leaf, nn.Parameter(own, requires_grad=False))
        if not mine:
            piece.into.copy_(part)


def parameter_paths(model: nn.Module) -> dict[str, str]:
    """The family's name of each parameter -> its path. A shared parameter appears under each of its names."""
    named = ((family_name(model, path), path) for path, _ in model.named_parameters(remove_duplicate=False))
    return {name: path for name, path in named if name is not None}


def first_names(model: nn.Module) -> dict[str, str]:
    """Each parameter's name -> the first name of the same parameter (its own name if modules do not share it)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(model.get_parameter(path)), name) for name, path in parameter_paths(model).items()
    }


def family_name(model: nn.Module, path: str) -> str | None:
    """The family's name of a parameter, without the wrappers of plugins; None if it belongs to a wrapper."""
    return family_path(getattr(model, "wrapped", {}), path)


def placements(model: nn.Module) -> defaultdict[str, Placement]:
    """Family's name of a parameter -> the Placement that its module has for it, else one without parts and shard."""
    found: defaultdict[str, Placement] = defaultdict(Placement)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, placement in getattr(module, "placements", {}).items():
            if (name := family_name(model, f"{prefix}.{leaf}" if prefix else leaf)) is not None:
                found[name] = placement
    return found


def tie(model: nn.Module, weights: WeightMap, filled: Collection[str]) -> bool:
    """Let parameters that the checkpoint lacks share memory with the parameters that `WeightMap.tie` names.

    `filled`: the names of the parameters that the checkpoint fills. Returns True if any were tied. Raises ConfigError
    if a rule names a module that the model does not have.
    """
    paths, elsewhere = parameter_paths(model), _elsewhere(model)
    rules = {name: source for name, source in weights.tie.items() if not elsewhere(name)}
    # A quantized linear has no parameter `weight`, so modules are compared.
    modules = {name.rpartition(".")[0] for name in paths}
    for name in (name for rule in rules.items() for name in rule):
        if name.rpartition(".")[0] not in modules and not elsewhere(name):
            raise ConfigError(
                f"WeightMap: tie names {name!r}, which the model does not have; the author of the family has to "
                f"name parameters of its modules, such as {', '.join(list(paths)[:3])}"
            )
    lacking = {name: source for name, source in rules.items() if name not in filled and {name, source} <= paths.keys()}
    for name, source in lacking.items():
        shared = model.get_parameter(paths[source])
        module, leaf = _owner(model, paths[name])
        if (share := getattr(module, "share", None)) is not None:
            share(shared)
        else:
            setattr(module, leaf, shared)
    return bool(lacking)


def _zero_biases(checkpoint: Checkpoint, among: Collection[str]) -> set[str]:
    """The biases in `among` that add nothing. AutoGPTQ saves one for every linear, also for those without a bias."""
    biases = {name for name in among if name.endswith(".bias")}
    return {name for name, read in checkpoint.tensors() if name in biases and not read().any()} if biases else set()


def _elsewhere(model: nn.Module) -> Callable[[str], bool]:
    """(a parameter's name) -> True if it belongs to another slice of the model."""
    return getattr(model, "elsewhere", lambda name: False)


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that has the parameter at `path`, and the parameter's name in it."""
    module, _, leaf = path.rpartition(".")
    return model.get_submodule(module), leaf


def _any_layer(name: str) -> str:
    """A tensor's name with "#" in place of the numbers of layers and experts."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", name)


def _equal(held: torch.Tensor, part: torch.Tensor) -> bool:
    """True if `part` has the same bits as `held`, after conversion to its type."""
    rows = max(1, COMPARED // max(1, held[:1].numel()))
    return all(
        torch.equal(_bits(mine), _bits(theirs.to(mine.device, mine.dtype)))
        for mine, theirs in zip(torch.split(held, rows), torch.split(part, rows), strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as int64 where they fit, else uint8: a CPU compares these much faster than bf16."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat if flat.numel() % 8 or flat.storage_offset() % 8 else flat.view(torch.int64)
