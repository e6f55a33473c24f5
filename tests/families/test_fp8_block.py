"""Checkpoints with FP8 blocks: what they mean, wherever their scales lie, and what is wrong with broken ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api import ConfigError
from llmcore.cli import main
from llmcore.weights.quant import find_quantization, unquantized
from llmcore.weights.source import open_checkpoint, read_model
from llmcore_deepseek import reads_fp8_blocks
from llmcore_deepseek.fp8_block import dequantized, make
from llmcore_devtools import check_plugin
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.family import assert_same, oracle, small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from safetensors.torch import load_file, save_file

BLOCK = (16, 32)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"],
}
CPU = torch.device("cpu")
REGISTRY = registry_for_tests()


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 blocks, and a scale per block that takes its largest element to 448; plain loops, no repeats."""
    high, wide = BLOCK
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // high), -(-columns // wide))
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scale[i, j] = weight[block].abs().max() / 448
            out[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return out, scale


def meaning(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = (torch.arange(size) // block for size, block in zip(weight.shape, BLOCK, strict=True))
    return weight.float() * scale[rows[:, None], columns[None, :]]


def converted(name: str) -> bool:
    return name.endswith("_proj.weight") and name != "model.layers.0.mlp.down_proj.weight"


def write(folder: Path, config: Mapping[str, Any], files: Mapping[str, Mapping[str, torch.Tensor]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file(dict(tensors), folder / name)
    names = {tensor: file for file, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with FP8 blocks, scales before and behind their weights and in another file; and what they mean."""
    folder = tmp_path_factory.mktemp("fp8")
    theirs = small_model(request.param, tie_word_embeddings=False)
    theirs.save_pretrained(folder / "plain")
    first: dict[str, torch.Tensor] = {}
    second: dict[str, torch.Tensor] = {}
    for index, (name, tensor) in enumerate(sorted(load_file(folder / "plain" / "model.safetensors").items())):
        if converted(name):
            weight, scale = quantize(tensor)
            (first if index % 2 else second)[name] = weight
            (first if index % 3 else second)[f"{name}_scale_inv"] = scale
            theirs.get_parameter(name).data.copy_(meaning(weight, scale))
        else:
            first[name] = tensor
    config = json.loads((folder / "plain" / "config.json").read_text()) | {"quantization_config": FP8}
    return write(folder / "fp8", config, {"a.safetensors": first, "b.safetensors": second}), theirs


def test_the_model_is_the_one_with_dequantized_weights(model: tuple[Path, Any]) -> None:
    folder, theirs = model
    ours = LoadedModel(folder, registry=REGISTRY)
    for prompt in ([7], [5, 99, 3, 77, 20, 41, 8, 130, 0, 64, 2]):
        assert_same("fp8", ours.generate(prompt, 5), oracle(theirs, prompt, 5), 1e-4)


def test_an_fp8_head_that_differs_from_the_embedding_it_is_tied_to(tmp_path: Path) -> None:
    theirs = small_model("LlamaForCausalLM", tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    weight, scale = quantize(tensors["model.embed_tokens.weight"].flip(0))
    theirs.lm_head.weight = torch.nn.Parameter(meaning(weight, scale))
    config = json.loads((tmp_path / "plain" / "config.json").read_text()) | {"quantization_config": FP8}
    head = {"lm_head.weight": weight, "lm_head.weight_scale_inv": scale}
    folder = write(tmp_path / "fp8", config, {"a.safetensors": {**tensors, **head}})
    ours, prompt = LoadedModel(folder, registry=REGISTRY), [5, 99, 3, 77]
    assert_same("fp8", ours.generate(prompt, 5), oracle(theirs, prompt, 5), 1e-4)


def test_the_engine_loads_it_and_plan_knows_its_sizes(model: tuple[Path, Any], capsys: Any) -> None:
    folder, theirs = model
    count = sum(parameter.numel() for parameter in theirs.parameters())
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        assert LoadedModel(folder, registry=REGISTRY, data_type=dtype).weight_bytes == count * size
        with pytest.raises(SystemExit, match="0"):
            main(["plan", str(folder), "--data_type", dtype, "--device", "cpu", "--json"])
        plan = json.loads(capsys.readouterr().out)
        assert (plan["budget"]["parameters"], plan["budget"]["weights"]) == (count, count * size)
        assert plan["stored"]["F8_E4M3"] == sum(converted(name) for name, _ in theirs.named_parameters())


def test_the_checkpoint_keeps_the_contracts(model: tuple[Path, Any]) -> None:
    folder, theirs = model
    assert check_plugin(REGISTRY, "deepseek", [folder])["register_quant_methods"] == 1
    stored = open_checkpoint(REGISTRY, folder)
    _, config = read_model(REGISTRY, stored.config(), "bf16")
    found = find_quantization(REGISTRY, stored.config(), config)
    assert found is not None and found.name == "fp8-block"
    for name, read in unquantized(found, stored, CPU).tensors():
        dtype = torch.bfloat16 if converted(name) else torch.float32
        assert read().dtype == dtype and torch.equal(read(), theirs.get_parameter(name).to(dtype)), name


@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (17, 33), (15, 64), (200, 7), (0, 5)])
def test_odd_edges(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 16), -(-shape[1] // 32), generator=generator)
    want = meaning(weight, scale)
    for chunk in (1, 600, 1 << 22):
        monkeypatch.setattr("llmcore_deepseek.fp8_block.CHUNK", chunk)
        assert torch.equal(dequantized(weight, scale, BLOCK, torch.float32), want)
        assert torch.equal(dequantized(weight, scale, BLOCK, torch.bfloat16), want.to(torch.bfloat16))


def test_scales_of_other_types(tmp_path: Path) -> None:
    weight, scale = torch.full((3, 40), 2.0).to(torch.float8_e4m3fn), torch.tensor([[0.5, 4.0]])
    for dtype in (torch.bfloat16, torch.float8_e8m0fnu):
        tensors = {"w.weight": weight, "w.weight_scale_inv": scale.to(dtype)}
        stored = open_checkpoint(REGISTRY, write(tmp_path, {}, {"m.safetensors": tensors}))
        ((_, row),) = [(name, read()[0]) for name, read in make(FP8, CONFIG).checkpoint(stored, CPU).tensors()]
        assert row.tolist() == [1.0] * 32 + [8.0] * 8


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size .* is \[128\]; fp8-block needs \[rows, columns\]"),
        ({"weight_block_size": [0, 128]}, r"is \[0, 128\]"),
        ({"weight_block_size": 128}, "is 128"),
        ({"fmt": "e5m2"}, "fmt in quantization_config is 'e5m2'; fp8-block reads e4m3 only"),
        ({"activation_scheme": "static"}, "activation_scheme .* is 'static'; fp8-block reads dynamic only"),
        ({"weight_block_size": None}, "quantized with 'fp8' .*fp8-block: quant_method fp8 with a weight_block_size"),
        ({"quant_method": "fbgemm_fp8"}, "quantized with 'fbgemm_fp8' .*no plugin brings a method"),
    ],
)
def test_configs_that_are_something_else(changed: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_quantization(REGISTRY, {"quantization_config": FP8 | changed}, CONFIG)
    assert not reads_fp8_blocks({"quant_method": "fp8"})


WEIGHT = torch.ones(17, 33).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w.weight": WEIGHT}, "w.weight is float8 and has no w.weight_scale_inv"),
        (
            {"w.weight": WEIGHT, "w.weight_scale_inv": torch.ones(1, 2)},
            r"w.weight_scale_inv is \[1, 2\]; w.weight is \[17, 33\], which has \[2, 2\] blocks of \[16, 32\]",
        ),
        ({"w.weight": torch.ones(2, 2)}, "no tensor is float8; remove its quantization_config if they were"),
    ],
)
def test_tensors_that_contradict_the_config(tmp_path: Path, tensors: Mapping[str, torch.Tensor], message: str) -> None:
    stored = open_checkpoint(REGISTRY, write(tmp_path, {}, {"m.safetensors": tensors}))
    with pytest.raises(ConfigError, match=message):
        make(FP8, CONFIG).checkpoint(stored, CPU)


def test_experts_are_dequantized_one_by_one(tmp_path: Path) -> None:
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1}
    small_model("Qwen3MoeForCausalLM", **sizes).save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    stored = dict(tensors)
    experts = [name for name in tensors if ".experts." in name]
    assert len(experts) == 3 * 5 * 3
    for name in experts:
        stored[name], stored[f"{name}_scale_inv"] = quantize(tensors[name])
        tensors[name] = meaning(stored[name], stored[f"{name}_scale_inv"])
    fp8 = LoadedModel(write(tmp_path / "fp8", config | {"quantization_config": FP8}, {"m.safetensors": stored}))
    plain = LoadedModel(write(tmp_path / "meant", config, {"m.safetensors": tensors}))
    assert torch.equal(fp8.all_logits(range(20)), plain.all_logits(range(20)))
