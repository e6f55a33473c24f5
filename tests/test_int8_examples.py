"""The longer examples of docs/authors: a KV layout with its own attention, and linears that stay int8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore_devtools import check_plugin, registry_of
from llmcore_devtools.loaded_model import LoadedModel
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples" / "int8"
TOKENS = list(range(3, 40))


def small(folder: Path, **more: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=128, **sizes, **more)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_kernel_of_a_layout_of_its_own_is_checked_over_that_layout() -> None:
    file = str(EXAMPLES / "int8_kv.py")
    assert check_plugin(registry_of(file), "int8_kv")["register_kernels"] == 3


def test_a_kernel_that_reads_it_wrongly_is_found(tmp_path: Path) -> None:
    text = (EXAMPLES / "int8_kv.py").read_text()
    right = "(pool * scales[..., None])"
    assert right in text
    (tmp_path / "wrong.py").write_text(text.replace(right, "(pool * scales[..., :1, None])"))  # the first head's scale
    with pytest.raises(AssertionError, match=r"attn\.gqa\.decode, sample 1, output 0: off by"):
        check_plugin(registry_of(str(tmp_path / "wrong.py")), "wrong")


@pytest.mark.parametrize("more", [{}, {"attention_bias": True}, {"tie_word_embeddings": True}])
def test_linears_that_stay_int8_give_the_plain_models_logits(more: dict[str, Any], tmp_path: Path) -> None:
    plain, quantized = small(tmp_path / "plain", **more), tmp_path / "int8"
    quantized.mkdir()
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight") or name == "lm_head.weight":
            scale = tensor.abs().amax(1) / 127
            tensors[name] = (tensor / scale[:, None]).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, quantized / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "int8_linears"}
    }
    (quantized / "config.json").write_text(json.dumps(config))
    registry = registry_of(str(EXAMPLES / "int8_linears.py"), "llama")
    check_plugin(registry, "int8_linears", [quantized])
    left, right = (LoadedModel(path, registry=registry).all_logits(TOKENS) for path in (plain, quantized))
    assert 0 < float((left - right).abs().max()) < 0.05 * float(left.abs().max())


@pytest.mark.parametrize("stored", ["int8", "plain"])
def test_a_head_that_a_tied_config_does_not_expect(stored: str, tmp_path: Path) -> None:
    """It is used as the file has it: int8 beside its scale, or plain."""
    plain, quantized = small(tmp_path / "plain", tie_word_embeddings=True), tmp_path / "int8"
    quantized.mkdir()
    held = load_file(plain / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].flip(0)
    tensors = {}
    for name, tensor in held.items():
        tensors[name] = tensor
        if name.endswith("proj.weight") or (stored == "int8" and name == "lm_head.weight"):
            scale = tensor.abs().amax(1) / 127
            tensors[name] = (tensor / scale[:, None]).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, quantized / "model.safetensors")
    save_file(held, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    quant = {"quantization_config": {"quant_method": "int8_linears"}}
    (quantized / "config.json").write_text(json.dumps(config | quant))
    registry = registry_of(str(EXAMPLES / "int8_linears.py"), "llama")
    left, right = (LoadedModel(path, registry=registry) for path in (plain, quantized))
    assert right.model.lm_head.weight.dtype == (torch.int8 if stored == "int8" else torch.float32)
    expected = left.all_logits(TOKENS)
    assert 0 < float((expected - right.all_logits(TOKENS)).abs().max()) < 0.05 * float(expected.abs().max())


def test_a_checkpoint_of_which_some_linears_are_int8(tmp_path: Path) -> None:
    """The scales in the file tell which; drawn int8 weights have the size of plain ones."""
    plain, quantized = small(tmp_path / "plain"), tmp_path / "int8"
    quantized.mkdir()
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith("down_proj.weight")]:
        scale = tensors[name].abs().amax(1) / 127
        tensors[f"{name}_scale"], tensors[name] = scale, (tensors[name] / scale[:, None]).round().to(torch.int8)
    save_file(tensors, quantized / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    quant = {"quantization_config": {"quant_method": "int8_linears"}}
    (quantized / "config.json").write_text(json.dumps(config | quant))
    registry = registry_of(str(EXAMPLES / "int8_linears.py"), "llama")
    left, right = (LoadedModel(path, registry=registry) for path in (plain, quantized))
    kinds = {name: weight.dtype for name, weight in right.model.layers["0"].named_parameters() if "weight" in name}
    assert kinds["mlp.down_proj.weight"] == torch.int8
    assert torch.int8 not in {kind for name, kind in kinds.items() if "down" not in name}
    expected = left.all_logits(TOKENS)
    assert 0 < float((expected - right.all_logits(TOKENS)).abs().max()) < 0.05 * float(expected.abs().max())
    drawn = LoadedModel(quantized, registry=registry, dummy=True).model.layers["1"].mlp.down_proj
    assert abs(float((drawn.weight * drawn.weight_scale[:, None]).std()) - 0.02) < 0.001
