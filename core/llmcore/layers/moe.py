"""MoE: a router and many gated MLPs, a few of which process each token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from llmcore.api.errors import ConfigError
from llmcore.api.models import RouteSpec
from llmcore.layers.build import Build
from llmcore.layers.step import Bucketed
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


class MoE(nn.Module):
    """The feed-forward part of a sparse block.

    `inner`: width of each expert. `route`: the rule that chooses experts.
    `corrected`: the router has a correction per expert, which affects the choice but not the weights of experts.
    `shared`: width of a gated MLP that processes every token beside the experts, 0 for none.

    Parameters: `gate.weight` [experts, size], `gate.e_score_correction_bias` [experts] f32, `experts.gate_up_proj`
    [experts 2 inner, size] (each expert's gate before its up), `experts.down_proj` [experts size, inner],
    `shared_experts.gate_up_proj.weight` [2 shared, size], `shared_experts.down_proj.weight` [size, shared]. Every
    inner width is cut over mesh group "moe_tp". Raises ConfigError for an impossible route.
    """

    def __init__(
        self, build: Build, size: int, inner: int, route: RouteSpec, *, corrected: bool = False, shared: int = 0
    ) -> None:
        super().__init__()
        _check(route)
        self.route = route
        self.gate = _Router(build, size, route.experts, corrected)
        self.experts = _Experts(build, size, inner, route.experts)
        self.shared_experts = _Shared(build, size, shared) if shared else None
        width = 0 if self.shared_experts is None else self.shared_experts.width
        shape = {**shape_of(route), "bias": corrected, "size": size, "inner": self.experts.inner, "shared": width}
        self._fused = build.op("moe.fused", **shape)
        self._reduce = build.reduce("moe_tp")
        self._weights: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor] | None = None
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None

    def extra(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor | None:
        """A tensor [T, size] to add to the experts' sum, the same on every rank, or None.

        A family overrides it if every token also passes another module than a gated MLP, which `shared` covers.
        """
        return None

    def finish(self) -> None:
        """Bind the loaded tensors. The loader calls it once."""
        bias = self.gate.e_score_correction_bias
        self._weights = (self.gate.weight.data, None if bias is None else bias.data, *self.experts.views())
        self._shared = None if self.shared_experts is None else self.shared_experts.views()

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[T, size] -> [T, size]."""
        assert self._weights is not None, "weights are bound by the loader"
        op, extra = self._fused[step.bucket], self.extra(x, step)
        if self._reduce is None:
            return op(x, *self._weights, extra, self._shared)  # type: ignore[no-any-return]
        # Every rank has the whole extra, so it is added once, after the sum over the ranks.
        y: torch.Tensor = self._reduce[step.bucket](op(x, *self._weights, None, self._shared))
        return y if extra is None else y + extra


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


class _Experts(nn.Module):
    """The experts' parameters. They are two-dimensional, so each checkpoint tensor fills consecutive rows."""

    def __init__(self, build: Build, size: int, inner: int, experts: int) -> None:
        super().__init__()
        rows, columns = Shard("moe_tp", 0), Shard("moe_tp", 1)
        self.inner = build.mesh.share(inner, rows, "inner")
        self._experts, self._size = experts, size
        self.gate_up_proj = build.empty(experts * 2 * self.inner, size)
        self.down_proj = build.empty(experts * size, self.inner)
        self.placements = {
            "gate_up_proj": Placement(_parts(experts, {"gate_proj": self.inner, "up_proj": self.inner}), rows),
            "down_proj": Placement(_parts(experts, {"down_proj": size}), columns),
        }

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [experts, 2 inner, size] and [experts, size, inner] of the parameters."""
        gate_up = self.gate_up_proj.data.view(self._experts, 2 * self.inner, self._size)
        return gate_up, self.down_proj.data.view(self._experts, self._size, self.inner)


class _Shared(nn.Module):
    """The parameters of the shared MLP."""

    def __init__(self, build: Build, size: int, width: int) -> None:
        super().__init__()
        rows, columns = Shard("moe_tp", 0), Shard("moe_tp", 1)
        self.width = build.mesh.share(width, rows, "shared")
        parts = {"gate_proj": (0, self.width), "up_proj": (self.width, self.width)}
        self.gate_up_proj = _Weight(build.empty(2 * self.width, size), Placement(parts, rows))
        self.down_proj = _Weight(build.empty(size, self.width), Placement({}, columns))

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up and down."""
        return self.gate_up_proj.weight.data, self.down_proj.weight.data


class _Weight(nn.Module):
    """A module with one parameter, named `weight` as in a linear."""

    def __init__(self, weight: nn.Parameter, placement: Placement) -> None:
        super().__init__()
        self.weight = weight
        self.placements = {"weight": placement}


def _parts(experts: int, modules: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Placement.parts for all experts, one after the other. `modules`: module -> its rows in each expert."""
    parts, first = {}, 0
    for expert in range(experts):
        for module, rows in modules.items():
            parts[f"{expert}.{module}"] = (first, rows)
            first += rows
    return parts
