"""WeightMap: names of a checkpoint to parameters."""

from __future__ import annotations

from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.weights.map import Shard, Target, WeightMap

MAP = WeightMap(
    rename={"model.": "", "model.decoder.": "layers_of."},
    fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    split={"gate_up": ("gate_proj", "up_proj")},
    stack={"experts": {"up": ("gate_up_proj", "up_proj"), "q_proj": ("in", "q")}, "blocks": {"up": ("all", "up")}},
    skip=("*.inv_freq",),
)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("model.layers.0.self_attn.k_proj.weight", [("layers.0.self_attn.qkv_proj.weight", "k_proj")]),
        ("model.layers.0.self_attn.k_proj.bias", [("layers.0.self_attn.qkv_proj.bias", "k_proj")]),
        ("model.decoder.norm.weight", [("layers_of.norm.weight", None)]),
        ("mlp.gate_up.weight", [("mlp.gate_proj.weight", None), ("mlp.up_proj.weight", None)]),
        ("q_proj.weight", [("qkv_proj.weight", "q_proj")]),
        ("model.rotary_emb.inv_freq", []),
        ("model.mlp.experts.11.up.weight", [("mlp.experts.gate_up_proj", "11.up_proj")]),
        ("experts.0.q_proj.weight", [("experts.in", "0.q")]),
        ("layers.2.blocks.3.up.weight", [("layers.2.blocks.all", "3.up")]),
        ("experts.gate_up_proj", [("experts.gate_up_proj", None)]),
        ("experts.0.down.weight", [("experts.0.down.weight", None)]),
        ("experts.0.up.scale", [("experts.gate_up_proj_scale", "0.up_proj")]),
        ("experts.up.weight", [("experts.up.weight", None)]),
        ("experts.x.up.weight", [("experts.x.up.weight", None)]),
    ],
)
def test_targets(name: str, targets: list[tuple[str, str | None]]) -> None:
    assert MAP.targets(name) == tuple(Target(*target) for target in targets)


# --- GPT-2's names: ends of paths, and matrices that lie [inputs, outputs] ----------------------------------------

GPT2 = WeightMap(
    rename={"transformer.h.": "layers.", "transformer.wte.": "embed_tokens.", "transformer.": ""},
    suffix={
        "attn.c_attn": "self_attn.qkv_proj",
        "attn.c_proj": "self_attn.o_proj",
        "c_proj": "down_proj",
        "c_fc": "up_proj",
        "ln_1.gamma": "input_layernorm.weight",
    },
    transpose=("*.c_attn.weight", "*.c_proj.weight", "*.c_fc.weight"),
)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("transformer.h.3.attn.c_attn.weight", "layers.3.self_attn.qkv_proj.weight"),
        ("transformer.h.3.attn.c_attn.bias", "layers.3.self_attn.qkv_proj.bias"),
        ("transformer.h.3.attn.c_proj.weight", "layers.3.self_attn.o_proj.weight"),
        ("transformer.h.3.mlp.c_proj.weight", "layers.3.mlp.down_proj.weight"),
        ("transformer.h.3.ln_1.gamma", "layers.3.input_layernorm.weight"),
        ("transformer.wte.weight", "embed_tokens.weight"),
        ("h.3.xattn.c_proj.weight", "h.3.xattn.down_proj.weight"),
    ],
)
def test_ends_are_renamed_in_whole_components(name: str, target: str) -> None:
    assert GPT2.targets(name) == (Target(target),)
    assert name in GPT2.sources(Target(target))


def test_causal_masks_are_no_parameters_but_what_a_rule_names_is() -> None:
    assert GPT2.targets("transformer.h.0.attn.bias") == ()
    assert WeightMap(suffix={"attn": "qkv_proj"}).targets("h.0.attn.bias") == (Target("h.0.qkv_proj.bias"),)


@pytest.mark.parametrize(
    ("target", "sources"),
    [
        (("layers.0.self_attn.qkv_proj.weight", "k_proj"), "model.layers.0.self_attn.k_proj.weight"),
        (("mlp.up_proj.weight", None), "mlp.gate_up.weight"),
        (("mlp.experts.gate_up_proj", "11.up_proj"), "mlp.experts.11.up.weight"),
        (("mlp.experts.gate_up_proj_scale", "11.up_proj"), "mlp.experts.11.up.scale"),
        (("layers_of.norm.weight", None), "model.decoder.norm.weight"),
    ],
)
def test_the_way_back(target: tuple[str, str | None], sources: str) -> None:
    assert sources in MAP.sources(Target(*target))


@pytest.mark.parametrize(
    ("rules", "key"),
    [
        ({"fuse": {"attn.qkv_proj": ("q_proj",)}}, "attn.qkv_proj"),
        ({"fuse": {"qkv_proj": ("attn.q_proj",)}}, "attn.q_proj"),
        ({"split": {"attn.c_proj": ("o_proj",)}}, "attn.c_proj"),
        ({"stack": {"mlp.experts": {}}}, "mlp.experts"),
        ({"stack": {"experts": {"ffn.w1": ("gate_up_proj", "gate_proj")}}}, "ffn.w1"),
    ],
)
def test_a_dotted_key_where_one_module_is_meant(rules: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"takes the names of single modules, and '{key}' has a dot.*suffix="):
        WeightMap(**rules)


@pytest.mark.parametrize("rules", [{"skip": "layers.*"}, {"transpose": "*.w"}, {"fuse": {"qkv": "q_proj"}}])
def test_one_text_where_several_names_are_meant(rules: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"takes several names, and '(.*)' is one text; .* can write \('\1',\)"):
        WeightMap(**rules)


def test_rules_that_no_name_meets() -> None:
    names = ["transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"]
    wrong = WeightMap(
        rename=GPT2.rename, suffix={"attn.c_atn": "x", "mlp.c_fc": "y"}, transpose=("*.c_attn.weight", "*.cfc.weight")
    )
    assert wrong.idle(names) == ["suffix 'attn.c_atn'", "transpose '*.cfc.weight'"]
    quantized = WeightMap(transpose=("*.c_attn.weight",))
    assert quantized.idle(["h.0.attn.c_attn.qweight"]) == [] and quantized.idle(["h.0.attn.c_atn.qweight"])


def test_a_shard_repeats_few_multiples_and_pads_the_last_share() -> None:
    """(share, what each rank holds) of 2 KV heads of 8 elements, and of 300 tokens in blocks of 128."""
    cases = (
        (Shard("attn_tp", 0, 8, repeat=True), 16, 4, 8, [(0, 8), (0, 8), (8, 8), (8, 8)]),
        (Shard("attn_tp", 0, 8, repeat=True), 32, 2, 16, [(0, 16), (16, 16)]),
        (Shard("attn_tp", 0, 128, pad=True), 300, 2, 256, [(0, 256), (256, 44)]),
        (Shard("attn_tp", 0, 128, pad=True), 100, 3, 128, [(0, 100), (100, 0), (100, 0)]),
    )
    for shard, total, ranks, share, held in cases:
        assert shard.share(total, ranks) == share
        assert [shard.held(total, share, rank, ranks) for rank in range(ranks)] == held
    assert Shard("attn_tp", 0, 8, repeat=True).share(24, 2) is None
    assert Shard("attn_tp", 0, 8, repeat=True).share(24, 4) is None
