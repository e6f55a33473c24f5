"""Safetensors files: every broken one is a ConfigError that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llmcore.api.errors import ConfigError
from llmcore.weights.safetensors import SafetensorsCheckpoint
from safetensors.torch import save_file


def good(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"a": torch.ones(4, 4), "b": torch.ones(2)}, path / "model.safetensors")


def cut(path: Path) -> None:
    good(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def headerless(path: Path) -> None:
    good(path)
    (path / "model.safetensors").write_bytes(b"\xff" * 40)


def tiny(path: Path) -> None:
    good(path)
    (path / "model.safetensors").write_bytes(b"12")


def broken_config(path: Path) -> None:
    good(path)
    (path / "config.json").write_text("{not json")


def list_config(path: Path) -> None:
    good(path)
    (path / "config.json").write_text("[]")


def lost_shard(path: Path) -> None:
    good(path)
    weights = {"a": "model.safetensors", "c": "other.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def empty_index(path: Path) -> None:
    good(path)
    (path / "model.safetensors.index.json").write_text("{}")


def doubled(path: Path) -> None:
    good(path)
    save_file({"a": torch.ones(4, 4)}, path / "copy.safetensors")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (cut, "cut short .*not fully covered.*; download it again"),
        (headerless, "cut short or is not a safetensors file"),
        (tiny, "cut short or is not a safetensors file"),
        (broken_config, "no JSON"),
        (list_config, "no JSON object"),
        (lost_shard, "lacks other.safetensors"),
        (empty_index, "no weight_map"),
        (doubled, "holds a, and so does another"),
    ],
)
def test_broken(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError, match=says):
        SafetensorsCheckpoint(tmp_path)


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    good(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    read = {name: tensor() for name, tensor in checkpoint.tensors()}
    assert list(read) == list(checkpoint.sizes())
    assert torch.equal(read["a"], torch.ones(4, 4)) and torch.equal(read["b"], torch.ones(2))


def test_an_index_reaches_no_file_outside_the_directory(tmp_path: Path) -> None:
    (inside := tmp_path / "model").mkdir()
    good(inside)
    save_file({"c": torch.ones(1)}, tmp_path / "outside.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "c": "../outside.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks outside\.safetensors"):
        SafetensorsCheckpoint(inside)


def test_a_generation_config_is_optional(tmp_path: Path) -> None:
    good(tmp_path)
    assert SafetensorsCheckpoint(tmp_path).generation_config() == {}
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    assert SafetensorsCheckpoint(tmp_path).generation_config() == {"top_k": 3}


def test_a_config_without_weights_has_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": []}')
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert (checkpoint.config(), dict(checkpoint.sizes()), list(checkpoint.tensors())) == (
        {"architectures": []},
        {},
        [],
    )


# --- how the weights are quantized -------------------------------------------------------------------------------

GPTQ, OTHER = {"bits": 4, "group_size": 128}, {"quant_method": "other"}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        ({"quantize_config.json": GPTQ}, {"quant_method": "gptq", **GPTQ}),
        ({"quant_config.json": {"w_bit": 4}}, {"quant_method": "awq", "w_bit": 4}),
        ({"hf_quant_config.json": {"producer": {}}}, {"quant_method": "modelopt", "producer": {}}),
        ({"quantize_config.json": {**GPTQ, **OTHER}}, {**GPTQ, **OTHER}),
        ({"config.json": {"quantization_config": OTHER}, "quantize_config.json": GPTQ}, OTHER),
        ({"config.json": {"text_config": {"quantization_config": OTHER}}, "quantize_config.json": GPTQ}, OTHER),
        ({"config.json": {"quantization_config": None, "text_config": {}}, "quant_config.json": OTHER}, OTHER),
        ({"config.json": {"compression_config": OTHER}, "quant_config.json": GPTQ}, OTHER),
    ],
)
def test_where_a_quantization_is_described(
    tmp_path: Path, files: dict[str, dict[str, object]], found: dict[str, object] | None
) -> None:
    good(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert SafetensorsCheckpoint(tmp_path).config().get("quantization_config") == found


def test_a_broken_description_is_named(tmp_path: Path) -> None:
    good(tmp_path)
    (tmp_path / "quantize_config.json").write_text("[4]")
    with pytest.raises(ConfigError, match=r"quantize_config\.json holds no JSON object"):
        SafetensorsCheckpoint(tmp_path)
