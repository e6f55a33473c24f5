"""Every broken model directory is a ConfigError that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from held import Held
from llmcore.api.errors import ConfigError
from llmcore.weights.map import WeightMap
from llmcore.weights.source import open_checkpoint, outputs_first, read_model
from llmcore_devtools.loaded_model import registry_for_tests
from safetensors.torch import save_file

REGISTRY = registry_for_tests()


def good(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"a": torch.ones(4, 4), "b": torch.ones(2)}, path / "model.safetensors")


def pickles(path: Path) -> None:
    (path / "config.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"x")


def no_config(path: Path) -> None:
    save_file({"a": torch.ones(4)}, path / "model.safetensors")


def config_only(path: Path) -> None:
    (path / "config.json").write_text("{}")


def two_gguf(path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (path / name).write_bytes(b"GGUF")


def cut_gguf(path: Path) -> None:
    (path / "a.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (pickles, "pickle.*convert it"),
        (no_config, "no config.json"),
        (config_only, "no weights; download"),
        (two_gguf, "2 GGUF files .a.gguf, b.gguf.*give --model_dir the one"),
        (cut_gguf, "cut short or broken"),
    ],
)
def test_broken(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError, match=says):
        open_checkpoint(REGISTRY, tmp_path)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_checkpoint(REGISTRY, tmp_path / "nowhere")
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(ConfigError, match="no weight loader recognises"):
        open_checkpoint(REGISTRY, file)


def test_good_and_config_alone(tmp_path: Path) -> None:
    good(tmp_path)
    assert open_checkpoint(REGISTRY, tmp_path).sizes() == {"a": ((4, 4), "F32"), "b": ((2,), "F32")}
    (tmp_path / "model.safetensors").unlink()
    assert open_checkpoint(REGISTRY, tmp_path, weights=False).config() == {"architectures": ["LlamaForCausalLM"]}


def test_what_a_config_may_lack() -> None:
    with pytest.raises(ConfigError, match="lacks 'num_attention_heads'"):
        read_model(REGISTRY, {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ConfigError, match="unknown architecture"):
        read_model(REGISTRY, {"architectures": ["NoSuchModel"]})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"vocab_size": "many"}, "does not suit LlamaForCausalLM .*'many'"),
        ({"vocab_size": 0}, "gives 0 for vocab_size"),
        ({"num_attention_heads": 0}, "does not suit LlamaForCausalLM"),
        ({"num_hidden_layers": -1}, "gives -1 for num_layers"),
        ({"rope_scaling": "linear"}, "does not suit LlamaForCausalLM"),
        ({"eos_token_id": "</s>"}, "eos_token_id .* '</s>' .* token id"),
        ({"architectures": "LlamaForCausalLM"}, "architectures .* list"),
    ],
)
def test_values_no_model_has(changed: dict[str, Any], says: str) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 9, **sizes}
    assert read_model(REGISTRY, config)[1].vocab_size == 9
    with pytest.raises(ConfigError, match=says):
        read_model(REGISTRY, {**config, **changed})


def test_only_matrices_are_transposed() -> None:
    sizes = {"a.c_fc.weight": (3, 5), "b.weight": (3, 5), "a.c_fc.bias": (5,), "a.c_fc.stack": (2, 3, 5)}
    tensors = {name.replace(".", "__"): torch.rand(size) for name, size in sizes.items()}
    found = outputs_first(Held(**tensors), WeightMap(transpose=("*.c_fc.*",)))
    assert {name: shape for name, (shape, _) in found.sizes().items()} == {
        **sizes,
        "a.c_fc.weight": (5, 3),
        "a.c_fc.stack": (2, 5, 3),
    }
    for name, read in found.tensors():
        assert read().shape == found.sizes()[name][0]
