"""Layer: parts are attributes, and never others than torch.nn.Module's."""

from __future__ import annotations

import torch
from llmcore.layers import Layer
from torch import nn


class Double(Layer):
    """x -> part(x) + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.part: nn.Module | None = nn.Identity()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) + self.weight


def agree(layer: Layer) -> None:
    for parts in (layer._modules, layer._parameters):
        for name, part in parts.items():
            assert vars(layer)[name] is part
            assert getattr(layer, name) is part


def test_parts_are_attributes_whatever_is_put_there() -> None:
    layer = Double()
    agree(layer)
    layer.part = nn.ReLU()
    layer.weight = nn.Parameter(torch.zeros(2))
    layer.register_parameter("more", nn.Parameter(torch.zeros(1)))
    layer.register_parameter("weight", nn.Parameter(torch.zeros(3)))
    agree(layer)
    layer.set_submodule("part", nn.Identity())
    agree(layer)
    layer.part = None
    agree(layer)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "more"]


def test_parts_that_torch_replaces_are_seen() -> None:
    layer = Double()
    layer.to("meta")
    agree(layer)
    assert layer.weight.device.type == "meta"


def test_what_is_deleted_is_gone() -> None:
    layer = Double()
    del layer.part, layer.weight
    assert not hasattr(layer, "part") and not hasattr(layer, "weight")
    assert not list(layer.children()) and not list(layer.parameters())


def test_its_own_hooks_are_called() -> None:
    layer, seen = Double(), []
    x = torch.tensor([1.0, 2.0])
    assert layer(x).tolist() == [2.0, 3.0]
    before = layer.register_forward_pre_hook(lambda module, given: seen.append("before"))
    after = layer.register_forward_hook(lambda module, given, made: made * 2)
    assert layer(x).tolist() == [4.0, 6.0] and seen == ["before"]
    before.remove()
    after.remove()
    assert layer(x).tolist() == [2.0, 3.0] and seen == ["before"]
