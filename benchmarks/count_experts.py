"""A plugin file that counts the different experts that each mixture layer uses in a step.

It computes every route a second time and waits for the device. So use it in a separate run, with --disable_cudagraph.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from llmcore.api import DeviceInfo, LayerInfo, OpContext, hookimpl
from llmcore.layers import MoE
from llmcore.ops.moe import shape_of
from llmcore.ops.moe_route import Route

SEEN: dict[int, list[int]] = defaultdict(list)
"""Tokens of a step -> the number of experts that a layer used, for every layer of every such step."""


@hookimpl
def build_layer(layer: torch.nn.Module, info: LayerInfo) -> None:
    """Watch the mixtures in a block. The block stays as it is."""
    for module in layer.modules():
        if isinstance(module, MoE):
            context = OpContext(op="moe.route", device=DeviceInfo("cpu"), dtype="f32", shape=shape_of(module.route))
            module.register_forward_pre_hook(_counter(Route(context)))


def _counter(route: Route) -> Any:
    def count(module: MoE, arguments: tuple[torch.Tensor, ...]) -> None:
        x = arguments[0]
        _, experts = route(x, module.gate.weight, module.gate.e_score_correction_bias)
        SEEN[len(x)].append(experts.unique().numel())

    return count
