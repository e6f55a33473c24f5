"""WeightMap: names of a checkpoint to parameters."""

from __future__ import annotations

import pytest
from llmcore.errors import ConfigError
from llmcore.weights.dtypes import DATA_TYPES, data_type, read_dtype
from llmcore.weights.map import Target, WeightMap

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
        ("experts.0.up.bias", [("experts.0.up.bias", None)]),
        ("experts.up.weight", [("experts.up.weight", None)]),
        ("experts.x.up.weight", [("experts.x.up.weight", None)]),
    ],
)
def test_targets(name: str, targets: list[tuple[str, str | None]]) -> None:
    assert MAP.targets(name) == tuple(Target(*target) for target in targets)


def test_data_types() -> None:
    assert {name: data_type(name) for name in ("fp16", "bfloat16", "fp32")} == {
        "fp16": "f16",
        "bfloat16": "bf16",
        "fp32": "f32",
    }
    assert len(DATA_TYPES) == 6
    with pytest.raises(ConfigError, match="use one of fp16"):
        data_type("int8")


@pytest.mark.parametrize(
    ("hf", "dtype"),
    [({"dtype": "bfloat16"}, "bf16"), ({"torch_dtype": "float16"}, "f16"), ({}, "f32"), ({"dtype": None}, "f32")],
)
def test_read_dtype(hf: dict[str, str], dtype: str) -> None:
    assert read_dtype(hf) == dtype
