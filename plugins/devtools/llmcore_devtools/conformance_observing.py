"""Conformance of hooks that observe or that wrap layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pluggy
from llmcore.api.models import KVGroupSpec, LayerInfo, ModelConfig, ModelReport
from llmcore.api.specs import OptionSpec
from llmcore.config import Config
from llmcore.registry.registry import Registry

from llmcore_devtools.conformance import all_problems
from llmcore_devtools.conformance_contributions import RECORD

CONFIG = ModelConfig(
    architecture="ConformanceForCausalLM",
    vocab_size=32,
    hidden_size=8,
    num_layers=2,
    max_position=64,
    dtype="f32",
    kv_groups=(KVGroupSpec(name="kv", layers=(0, 1), kv_heads=1, key_size=4, value_size=4),),
)


def check_on_startup(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """The hook accepts default settings."""
    defaults = {spec.name: spec.default for spec, _ in registry.specs(OptionSpec)}
    return _call(registry, plugin, "on_startup", {"config": Config(plugin_options=defaults)})


def check_on_model_built(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """The hook accepts a report."""
    report = ModelReport(config=CONFIG, kernels={"linear": "torch"}, weight_bytes=1, kv_tokens=64, fingerprint="0")
    return _call(registry, plugin, "on_model_built", {"report": report})


def check_on_request_finished(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """The hook accepts a record."""
    return _call(registry, plugin, "on_request_finished", {"record": RECORD})


def check_on_shutdown(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """The hook may be called twice: a process that fails while it ends calls it again."""
    return _call(registry, plugin, "on_shutdown", {}) + _call(registry, plugin, "on_shutdown", {})


def check_build_layer(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """A wrapped layer is a module with results of the same type and shape, and it keeps all its parameters."""
    import torch
    from llmcore.layers import Rows

    caller = _caller(registry, plugin, "build_layer")
    x = torch.randn(3, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    with all_problems() as problems:
        for index in range(CONFIG.num_layers):
            with problems.of(f"layers.{index}"):
                layer = _block(CONFIG.hidden_size)
                weights = sum(p.numel() for p in layer.parameters())
                results = caller(layer=layer, info=LayerInfo(f"layers.{index}", index, CONFIG))
                wrapped = results[-1] if results else layer
                assert isinstance(wrapped, torch.nn.Module), f"build_layer returned a {type(wrapped).__name__}"
                assert sum(p.numel() for p in wrapped.parameters()) >= weights, "the wrapped layer lost its parameters"
                hidden, residual = wrapped((x, x), Rows(0))
                assert hidden.shape == residual.shape == x.shape, "the wrapped layer returns other shapes"
                assert hidden.dtype == residual.dtype == x.dtype, "the wrapped layer returns another dtype"
    return CONFIG.num_layers


def _block(width: int) -> Any:
    import torch

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(width), requires_grad=False)

        def forward(self, x: torch.Tensor, step: object) -> torch.Tensor:
            return x @ self.weight

    class Part(torch.nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, Linear())

        def forward(self, x: torch.Tensor, step: object) -> torch.Tensor:
            for linear in self.children():
                x = linear(x, step)
            return x

    class Block(torch.nn.Module):
        """A layer as Decoder calls it, with the modules that most families have in a layer."""

        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Part("qkv_proj", "o_proj")
            self.mlp = Part("gate_up_proj", "down_proj")

        def forward(self, x: tuple[torch.Tensor, torch.Tensor], step: object) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, residual = x
            return self.mlp(self.self_attn(hidden, step), step), residual

    return Block()


def _call(registry: Registry, plugin: str, hook: str, arguments: Mapping[str, object]) -> int:
    _caller(registry, plugin, hook)(**arguments)
    return 1


def _caller(registry: Registry, plugin: str, hook: str) -> pluggy.HookCaller:
    implementers = [info.name for info in registry.implementers(hook)]
    assert plugin in implementers, f"plugin {plugin!r} does not implement {hook}"
    return registry.caller(hook, plugin)
