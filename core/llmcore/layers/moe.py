"""MoE: a router and many gated MLPs, a few of which process each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from llmcore.api.errors import ConfigError
from llmcore.api.models import RouteSpec
from llmcore.layers.build import Bound, Build, LinearMethod, LinearShape, Unquantized, fill_normal
from llmcore.layers.linear import Linear
from llmcore.layers.partial import total_of
from llmcore.layers.step import Bucketed
from llmcore.ops import Op
from llmcore.ops.moe import shape_of
from llmcore.weights.map import Placement, Shard


def expert_names(
    gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """`WeightMap.stack` for checkpoints with separate tensors for each expert: ``experts.<i>.<gate>.weight``, ..."""
    parameters = {
        gate: ("gate_up_proj", "gate_proj"),
        up: ("gate_up_proj", "up_proj"),
        down: ("down_proj", "down_proj"),
    }
    return {"experts": parameters}


def expert_elements(route: RouteSpec, size: int, inner: int) -> int:
    """`ModelConfig.expert_elements`: gate and up, their product, and the result, for each chosen expert of a token."""
    return route.top_k * (3 * inner + size)


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts of one mixture on this rank, `top_k` of which process a token.

    `gate_up`, `down`: their stacks, as linears that have the outputs of one expert after the other. The parts of
    `gate_up` are "0.gate_proj", "0.up_proj", "1.gate_proj", ..., those of `down` are "0.down_proj", "1.down_proj", ...
    """

    experts: int
    top_k: int
    gate_up: LinearShape
    down: LinearShape

    @property
    def stacks(self) -> Mapping[str, LinearShape]:
        """The stacks by the names of their parameters."""
        return {"gate_up_proj": self.gate_up, "down_proj": self.down}


class BoundExperts(Protocol):
    """The tensors of the experts of one mixture."""

    def tensors(self) -> Mapping[str, tuple[nn.Parameter, Placement]]:
        """The allocated parameters by name, each with its Placement.

        A tensor `scale` of the checkpoint's modules fills parts of `gate_up_proj_scale` and of `down_proj_scale`.
        """

    def fused(self, shape: Mapping[str, Any]) -> tuple[Op, ...]:
        """A callable for each of TOKEN_BUCKETS that computes what op `moe.fused` does, with what `bind` returns for
        gate_up and down. `shape`: the shape of `moe.fused`. Called once, before the tensors are filled."""

    def bind(self) -> tuple[Any, Any]:
        """gate_up and down. Called once, after the tensors are filled."""

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill the tensor of parameter `name` with random numbers. See Bound."""


class ExpertMethod(Protocol):
    """Decides how the experts of a mixture hold and multiply their weights."""

    @property
    def multiples(self) -> tuple[int, int]:
        """As those of a LinearMethod, for both stacks."""

    def create(self, shape: ExpertShape, build: Build) -> BoundExperts:
        """The tensors of the experts of one mixture."""


class MoE(nn.Module):
    """The feed-forward part of a sparse block.

    `inner`: width of each expert. `route`: the rule that chooses experts.
    `corrected`: the router has a correction per expert, which affects the choice but not the weights of experts.
    `shared`: width of a gated MLP that processes every token beside the experts, 0 for none.
    `partial`: see Linear. A mixture with an `extra` returns the sum.

    Parameters: `gate.weight` [experts, size], `gate.e_score_correction_bias` [experts] f32, `experts.gate_up_proj`
    [experts 2 inner, size] (each expert's gate before its up), `experts.down_proj` [experts size, inner],
    `shared_experts.gate_up_proj.weight` [2 shared, size], `shared_experts.down_proj.weight` [size, shared]. Every
    inner width is cut over mesh group "moe_tp". Experts may be quantized, and then have the parameters that their
    ExpertMethod names. The shared MLP consists of linears, which may be quantized too; else op `moe.fused` takes their
    weights. `create_linears` creates them. Raises ConfigError for an impossible route.
    """

    def __init__(
        self,
        build: Build,
        size: int,
        inner: int,
        route: RouteSpec,
        *,
        corrected: bool = False,
        shared: int = 0,
        partial: bool = False,
    ) -> None:
        super().__init__()
        _check(route)
        self.route = route
        self.gate = _Router(build, size, route.experts, corrected)
        self.experts = Experts(build, size, inner, route)
        self.shared_experts = _Shared(build, size, shared) if shared else None
        inner = self.experts.shape.down.inputs
        self._shape = {**shape_of(route), "bias": corrected, "size": size, "inner": inner}
        self._fused: tuple[Op, ...] = ()
        self._reduce = build.reduce("moe_tp", size)
        self._partial = partial
        self._weights: tuple[torch.Tensor, torch.Tensor | None, Any, Any] | None = None
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None

    def extra(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor | None:
        """A tensor [T, size] to add to the experts' sum, the same on every rank, or None.

        A family overrides it if every token also passes another module than a gated MLP, which `shared` covers.
        """
        return None

    def create(self, name: str, method: ExpertMethod | None) -> None:
        """Create the experts' tensors. `create_linears` calls it once, after it created the shared MLP.

        `name`: the mixture's path in the model. `method`: how its experts are quantized; None if they are plain.
        """
        experts = self.experts.create(f"{name}.experts", method or PlainExperts())
        shared = self.shared_experts
        width = shared.down_proj.shape.inputs if shared is not None and shared.plain else 0
        self._fused = experts.fused({**self._shape, "shared": width})

    def finish(self) -> None:
        """Bind the loaded tensors. The loader calls it once."""
        bias = self.gate.e_score_correction_bias
        self._weights = (self.gate.weight.data, None if bias is None else bias.data, *self.experts.bind())
        if self.shared_experts is not None and self.shared_experts.plain:
            self._shared = self.shared_experts.weights()

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[T, size] -> [T, size]."""
        assert self._weights is not None, "weights are bound by the loader"
        op, extra, seen = self._fused[step.bucket], self.extra(x, step), None
        if self.shared_experts is not None and self._shared is None:
            seen = self.shared_experts(x, step)
        if self._reduce is None:
            return op(x, *self._weights, _sum(extra, seen), self._shared)  # type: ignore[no-any-return]
        partial = self._partial and extra is None
        y: torch.Tensor = total_of(op(x, *self._weights, seen, self._shared), "moe_tp", self._reduce, partial, step)
        # Every rank has the whole extra, so it is added once, after the sum over the ranks.
        return y if extra is None else y + extra


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


def _check(route: RouteSpec) -> None:
    groups, size = route.groups, route.experts // max(1, route.groups)
    if route.experts < 1 or groups < 1 or route.experts % groups or not 1 <= route.top_groups <= groups:
        raise ConfigError(
            f"{route.top_groups} of {groups} groups of {route.experts} experts is no choice; check the model's "
            f"config.json"
        )
    if not 1 <= route.top_k <= route.top_groups * size:
        raise ConfigError(
            f"{route.top_k} of {route.top_groups * size} experts is no choice; check the model's config.json"
        )
    if groups > 1 and size < 2 and route.group_score == "top2":
        raise ConfigError("group_score top2 needs groups of at least two experts; check the model's config.json")


class _Router(nn.Module):
    """The router's parameters."""

    e_score_correction_bias: nn.Parameter | None

    def __init__(self, build: Build, size: int, experts: int, corrected: bool) -> None:
        super().__init__()
        self.weight = build.empty(experts, size)
        bias = torch.empty(experts, dtype=torch.float32, device=build.torch_device) if corrected else None
        self.e_score_correction_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class Experts(nn.Module):
    """The experts' parameters. They are two-dimensional, so each checkpoint tensor fills consecutive rows."""

    def __init__(self, build: Build, size: int, inner: int, route: RouteSpec) -> None:
        super().__init__()
        rows, columns, count = Shard("moe_tp", 0), Shard("moe_tp", 1), route.experts
        inner = build.mesh.share(inner, rows, "inner")
        gate_up, down = _parts(count, {"gate_proj": inner, "up_proj": inner}), _parts(count, {"down_proj": size})
        self.build = build
        self.shape = ExpertShape(
            experts=count,
            top_k=route.top_k,
            gate_up=LinearShape(inputs=size, outputs=count * 2 * inner, parts=gate_up, shard=rows),
            down=LinearShape(inputs=inner, outputs=count * size, parts=down, shard=columns),
        )
        self.placements: dict[str, Placement] = {}
        self._bound: BoundExperts | None = None

    @property
    def numbers(self) -> int:
        """The numbers that the parameters stand for."""
        return sum(stack.inputs * stack.outputs for stack in self.shape.stacks.values())

    def create(self, name: str, method: ExpertMethod) -> BoundExperts:
        """Create the tensors."""
        gate_up, down = (replace(stack, name=f"{name}.{leaf}") for leaf, stack in self.shape.stacks.items())
        self.shape = replace(self.shape, gate_up=gate_up, down=down)
        self._bound = method.create(self.shape, self.build)
        for leaf, (parameter, placement) in self._bound.tensors().items():
            self.register_parameter(leaf, parameter)
            self.placements[leaf] = placement
        return self._bound

    def bind(self) -> tuple[Any, Any]:
        """gate_up and down, as the experts' op takes them."""
        return self._created().bind()

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill one of the tensors, for `--load_format dummy`."""
        self._created().fill_dummy(name, tensor, generator)

    def _created(self) -> BoundExperts:
        assert self._bound is not None, "experts have no tensors before llmcore.layers.create_linears(model)"
        return self._bound


class PlainExperts:
    """The ExpertMethod for weights in the model's dtype."""

    multiples = (1, 1)

    def create(self, shape: ExpertShape, build: Build) -> BoundExperts:
        """The stacks `gate_up_proj` and `down_proj`."""
        return _Plain(shape, build)


class _Plain:
    def __init__(self, shape: ExpertShape, build: Build) -> None:
        self.shape, self._build = shape, build
        self.held = {leaf: build.empty(stack.outputs, stack.inputs) for leaf, stack in shape.stacks.items()}

    def tensors(self) -> Mapping[str, tuple[nn.Parameter, Placement]]:
        return {leaf: (self.held[leaf], stack.placement()) for leaf, stack in self.shape.stacks.items()}

    def fused(self, shape: Mapping[str, Any]) -> tuple[Op, ...]:
        return self._build.op("moe.fused", **shape)

    def bind(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = (held.data.view(self.shape.experts, -1, held.shape[1]) for held in self.held.values())
        return gate_up, down

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        fill_normal(name, tensor, generator)


class _Unpacked(Unquantized):
    """The LinearMethod of plain weights that op `moe.fused` reads, which takes them as they are."""

    def create(self, shape: LinearShape, build: Build) -> Bound:
        """As that of Unquantized. A weight that another module reads is not packed."""
        return super().create(replace(shape, shared=build.empty(shape.outputs, shape.inputs)), build)


class _SharedLinear(Linear):
    """A linear whose results the mixture sums over the ranks, together with those of its experts."""

    unquantized = _Unpacked()
    plain = True

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._reduce = None

    def create(self, name: str, method: LinearMethod | None) -> None:
        """As that of Linear."""
        self.plain = method is None
        super().create(name, method)


class _Shared(nn.Module):
    """The MLP that every token passes. A rank has its part of each width, so results are shares of a sum."""

    def __init__(self, build: Build, size: int, width: int) -> None:
        super().__init__()
        outputs = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = _SharedLinear(build, size, outputs, shard=Shard("moe_tp", 0), activation="silu_and_mul")
        self.down_proj = _SharedLinear(build, width, size, shard=Shard("moe_tp", 1), source=self.gate_up_proj)

    @property
    def plain(self) -> bool:
        """True if both linears have plain weights."""
        return self.gate_up_proj.plain and self.down_proj.plain

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The plain weights of gate_up and down."""
        return self.gate_up_proj.get_parameter("weight").data, self.down_proj.get_parameter("weight").data

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[T, size] -> [T, size], this rank's share."""
        return self.down_proj(self.gate_up_proj(x, step), step)  # type: ignore[no-any-return]


def _parts(experts: int, modules: Mapping[str, int]) -> dict[str, int]:
    """LinearShape.parts for all experts, one after the other. `modules`: module -> its rows in each expert."""
    return {f"{expert}.{module}": rows for expert in range(experts) for module, rows in modules.items()}
