"""Slices of a decoder, blocks that plugins wrap, and the rows after the last attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llmcore.api import hookimpl
from llmcore.api.specs import PluginInfo
from llmcore.layers import Decoder
from llmcore_devtools import registry_of
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel, Row, registry_for_tests


def test_slices_of_a_decoder_compute_what_the_whole_does(tmp_path: Path) -> None:
    small_model("LlamaForCausalLM").save_pretrained(tmp_path)
    whole = LoadedModel(tmp_path)
    first, last = LoadedModel(tmp_path), LoadedModel(tmp_path)
    for part, kept in ((first, {"0"}), (last, {"1", "2"})):
        blocks = dict(part.model.layers.items())
        part.model = Decoder(
            part.build,
            lambda index, blocks=blocks: blocks[str(index)],
            layers=range(0, 1) if "0" in kept else range(1, 3),
            embedding=part.model.embed_tokens if "0" in kept else None,
            norm=None if "0" in kept else part.model.norm,
            head=None if "0" in kept else part.model.lm_head,
        )
        assert set(part.model.layers) == kept
    assert first.model.elsewhere("layers.2.mlp.down_proj.weight")
    assert first.model.elsewhere("norm.weight")
    assert not first.model.elsewhere("layers.0.mlp.down_proj.weight")
    rows = [Row(0, (5, 6, 7, 8), 0, 4)]
    with torch.inference_mode():
        middle = first.model(first.make_step(rows))
        step = last.make_step(rows)
        hidden, residual = last.model(step, *middle)
        logits = last.model.logits(hidden, residual)
    torch.testing.assert_close(logits, whole.step(rows))


def test_build_layer_wraps_every_block(tmp_path: Path) -> None:
    seen: list[str] = []

    class Probe:
        @staticmethod
        @hookimpl
        def build_layer(layer: Any, info: Any) -> Any:
            seen.append(info.name)

    registry = registry_for_tests()
    registry.add(PluginInfo("probe", "probe", "1", "probe"), lambda info: Probe)
    small_model("LlamaForCausalLM").save_pretrained(tmp_path)
    LoadedModel(tmp_path, registry=registry)
    assert seen == ["layers.0", "layers.1", "layers.2"]


WRAPPING = """
import torch
from llmcore.api import hookimpl


class Scaled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, step):
        hidden, residual = self.inner(x, step)
        return hidden * self.factor, residual


@hookimpl
def build_layer(layer, info):
    return Scaled(Scaled(layer)) if info.index != 1 else None
"""


def test_weights_find_a_block_that_a_plugin_wrapped(tmp_path: Path) -> None:
    path = tmp_path / "wrapping.py"
    path.write_text(WRAPPING)
    model = tmp_path / "model"
    small_model("LlamaForCausalLM").save_pretrained(model)
    rows = [Row(0, (5, 6, 7, 8), 0, 4)]
    for dummy in (False, True):
        plain = LoadedModel(model, dummy=dummy)
        wrapped = LoadedModel(model, dummy=dummy, registry=registry_of("llama", str(path)))
        assert wrapped.model.wrapped == {"layers.0": "layers.0.inner.inner", "layers.2": "layers.2.inner.inner"}
        assert torch.equal(wrapped.step(rows), plain.step(rows))


INSIDE = """
import torch
from llmcore.api import hookimpl


class LowRank(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.weight = torch.nn.Parameter(torch.zeros(72, 2))

    def forward(self, x, step):
        return self.inner(x, step)


@hookimpl
def build_layer(layer, info):
    if info.index == 2:
        return None
    layer.mlp.down_proj = LowRank(layer.mlp.down_proj)
    layer.self_attn.qkv_proj = LowRank(layer.self_attn.qkv_proj)
    layer.self_attn = LowRank(layer.self_attn)
    return LowRank(layer) if info.index else layer
"""


def test_weights_find_the_parts_of_a_block_that_a_plugin_wrapped(tmp_path: Path) -> None:
    """Its own parameters may have the names of those inside."""
    path = tmp_path / "wrapping.py"
    path.write_text(INSIDE)
    model = tmp_path / "model"
    small_model("LlamaForCausalLM").save_pretrained(model)
    rows = [Row(0, (5, 6, 7, 8), 0, 4)]
    plain = LoadedModel(model)
    wrapped = LoadedModel(model, registry=registry_of("llama", str(path)))
    assert wrapped.model.wrapped == {
        "layers.0.self_attn": "layers.0.self_attn.inner",
        "layers.0.self_attn.qkv_proj": "layers.0.self_attn.inner.qkv_proj.inner",
        "layers.0.mlp.down_proj": "layers.0.mlp.down_proj.inner",
        "layers.1": "layers.1.inner",
        "layers.1.self_attn": "layers.1.inner.self_attn.inner",
        "layers.1.self_attn.qkv_proj": "layers.1.inner.self_attn.inner.qkv_proj.inner",
        "layers.1.mlp.down_proj": "layers.1.inner.mlp.down_proj.inner",
    }
    assert torch.equal(wrapped.step(rows), plain.step(rows))


def test_after_the_last_attention_only_sampled_tokens_matter(tmp_path: Path) -> None:
    small_model("LlamaForCausalLM").save_pretrained(tmp_path)
    loaded = LoadedModel(tmp_path)
    rows = [Row(0, (5, 6, 7, 8, 9, 10, 11), 0, 7), Row(1, (3, 4), 0, 2)]
    fed: list[int] = []
    loaded.model.layers["2"].mlp.register_forward_pre_hook(lambda module, given: fed.append(len(given[0])))
    halves = loaded.step(rows)
    # a block that some plugin has wrapped need not have halves
    loaded.model._blocks = (*loaded.model._blocks[:-1], Whole(loaded.model._blocks[-1]))
    torch.testing.assert_close(loaded.step(rows), halves)
    assert fed == [2, 9]
    with torch.inference_mode():
        hidden, _ = loaded.model(replace(loaded.make_step(rows), sampled=None))
    assert len(hidden) == 9


class Whole(torch.nn.Module):
    """Calls a block as a whole."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Any, step: Any) -> Any:
        return self.block(x, step)
