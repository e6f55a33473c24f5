"""Fixed scales of fp8 KV: what `llmcore calibrate` measures and writes, how the file is read, and what checkpoints
have."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_cache import ChangedCache
from llmcore import LLM
from llmcore.api import ConfigError, KVGroupSpec
from llmcore.cli import main
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.family import small_model
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_quantization.kv.calibration import calibrate, read_file, stored_scales, write_file
from llmcore_quantization.kv.layouts import TokenCodes
from safetensors.torch import load_file, save_file

LAYERS, HEADS = 2, 3
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 96,
}
TEXT = "The river slows down and spreads over the mud. In winter the boats stand on blocks. " * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    small_model("LlamaForCausalLM", **SIZES).save_pretrained(path)
    return write_tokenizer(path)


@torch.inference_mode()
def seen_by_transformers(model: Any, prompts: Iterable[Sequence[int]]) -> torch.Tensor:
    """The largest absolute keys, after rope, and values: [layers, 2, heads]."""
    largest = torch.zeros(LAYERS, 2, HEADS)

    def watch(layer: int, *both: torch.Tensor) -> Any:
        found = torch.stack([part.abs().amax((0, 2, 3)) for part in both])
        largest[layer] = largest[layer].maximum(found)
        return both

    for prompt in prompts:
        model(torch.tensor([list(prompt)]), past_key_values=ChangedCache(watch), use_cache=True)
    return largest


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["calibrate", "--device", "cpu", "--data_type", "fp32", *args])
    return int(end.value.code or 0)


@pytest.mark.parametrize(("kind", "option"), [("per_head", "fp8kv_sph"), ("per_tensor", "fp8kv_spt")])
def test_scales_are_those_that_transformers_sees(
    folder: Path, tmp_path: Path, kind: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "scales.json"
    prompts.write_text(TEXT)
    # The first prompts are measured before later ones take their slots.
    assert (
        run(
            str(folder), "--prompts", str(prompts), "--prompt_len", "40", "--quant_type", kind, "--output", str(output)
        )
        == 0
    )
    said = capsys.readouterr().out
    assert f"--llm_kv_type {option} --kv_quant_calibration_config_path {output}" in said
    with LLM(folder, ["llama", "quantization"], device="cpu", data_type="fp32") as llm:
        ids = llm.tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(ids) > 6 * 40 and f"from {len(ids):,} tokens" in said
    pieces = [ids[first : first + 40] for first in range(0, len(ids), 40)]
    largest = seen_by_transformers(small_model("LlamaForCausalLM", **SIZES), pieces)
    expected = (largest if kind == "per_head" else largest.amax(-1, keepdim=True)).flatten(1) / 448
    file = json.loads(output.read_text())
    assert {**file, "scales": None} == {
        "version": "1.0",
        "architectures": "LlamaForCausalLM",
        "quant_type": kind,
        "qmin": -448.0,
        "qmax": 448.0,
        "num_layers": LAYERS,
        "num_head": HEADS,
        "scales_shape": list(expected.shape),
        "scales": None,
    }
    torch.testing.assert_close(torch.tensor(file["scales"]), expected, rtol=1e-5, atol=0)
    # and a server reads it
    settings: dict[str, Any] = {"llm_kv_type": option, "kv_quant_calibration_config_path": str(output)}
    with LLM(folder, ["llama", "quantization"], device="cpu", data_type="fp32", **settings) as llm:
        (group,) = llm.kv
        for layer, kv in group.kv.items():
            rows = expected[layer].view(2, -1).expand(2, HEADS)
            torch.testing.assert_close(torch.stack(kv[2:]), rows, rtol=1e-5, atol=0)
        assert len(llm.generate(TEXT[:40], max_new_tokens=4)[0].token_ids) > 0


def test_the_text_that_comes_with_it(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "scales.json"
    assert run("--model_dir", str(folder), "--output", str(output)) == 0
    assert all(scale > 0 for row in json.loads(output.read_text())["scales"] for scale in row)


def test_it_measures_plain_kv_whatever_the_file_of_settings_says(folder: Path, tmp_path: Path) -> None:
    settings, output = tmp_path / "settings.yaml", tmp_path / "scales.json"
    lines = (
        *("llm_kv_type: fp8kv_sph", "kv_quant_calibration_config_path: not-there-yet.json"),
        *("max_req_total_len: 90", "max_req_input_len: 80"),
    )
    settings.write_text("\n".join(lines))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXT)
    found = []
    for more in ((), ("--config", str(settings))):
        assert run(str(folder), "--prompts", str(prompts), "--output", str(output), *more) == 0
        found.append(output.read_text())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompts", "not-there.txt"), "--prompts not-there.txt: No such file or directory"),
        (("--prompts", "."), "--prompts .: Is a directory"),
        (("--prompts", "binary.txt"), "--prompts binary.txt is not a text in UTF-8"),
        (("--prompts", "empty.txt"), "--prompts empty.txt has no text"),
        (("--output", "nowhere/scales.json"), "--output nowhere/scales.json: there is no such folder"),
        (
            ("--mode", "triton_int8kv"),
            "--mode triton_int8kv stores KV in another layout, and scales are measured on plain KV",
        ),
        (("--quant_type", "per_layer"), "per_layer"),
        (("--prompt_len", "1"), "prompt_len"),
    ],
)
def test_errors(
    args: tuple[str, ...],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.txt").write_text(" \n")
    monkeypatch.chdir(tmp_path)
    assert run(str(folder), *args) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.rglob("*.json"))


def test_a_model_without_such_kv_is_refused_before_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_model("DeepseekV3ForCausalLM").save_pretrained(tmp_path)
    capsys.readouterr()
    assert run(str(tmp_path)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "weights..." not in said
    assert "DeepseekV3ForCausalLM stores KV as mla-latent, and fixed scales are for KV of layout token" in said
    assert "--mode triton_fp8kv" in said


def test_a_model_with_numbers_that_are_not_finite_gives_no_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][0] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    output = tmp_path / "scales.json"
    assert run(str(tmp_path), "--output", str(output)) == 1
    assert "was not finite" in capsys.readouterr().err and not output.exists()


# --- the file --------------------------------------------------------------------------------------------------------

MODEL = replace(
    CONFIG,
    architecture="LlamaForCausalLM",
    num_layers=LAYERS,
    kv_groups=(KVGroupSpec(name="kv", layers=(0, 1), kv_heads=HEADS, key_size=8, value_size=8, layout="token-fp8"),),
)


def largest() -> torch.Tensor:
    return torch.arange(1.0, 1 + LAYERS * 2 * HEADS).view(LAYERS, 2, HEADS)


def layout() -> TokenCodes:
    return TokenCodes(MODEL.kv_groups[0], 1, "bf16")


class Stored:
    """A checkpoint with these scales alone."""

    def __init__(self, scales: Mapping[str, torch.Tensor]) -> None:
        self._scales = scales

    def config(self) -> dict[str, Any]:
        return {}

    generation_config = config

    def sizes(self) -> dict[str, Any]:
        return {name: (tuple(scale.shape), "F32") for name, scale in self._scales.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, scale in self._scales.items():
            yield name, scale.clone


@pytest.mark.parametrize("kind", ["per_head", "per_tensor"])
def test_the_file_comes_back(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    write_file(path, "LlamaForCausalLM", kind, largest())
    filled = layout()
    calibrate(filled, MODEL, Stored({}), {"kv_quant_calibration_config_path": str(path), "llm_kv_type": None})
    expected = (largest() if kind == "per_head" else largest().amax(-1, keepdim=True)) / 448
    for layer in range(LAYERS):
        torch.testing.assert_close(torch.stack(filled.constants(layer)), expected[layer].expand(2, HEADS))
    assert filled.identity != layout().identity


def test_a_head_that_is_always_zero_has_a_scale(tmp_path: Path) -> None:
    write_file(tmp_path / "scales.json", "LlamaForCausalLM", "per_head", torch.zeros(LAYERS, 2, HEADS))
    calibrate(layout(), MODEL, Stored({}), {"kv_quant_calibration_config_path": str(tmp_path / "scales.json")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "2.0"}, "version is '2.0', this model needs '1.0'"),
        (
            {"architectures": "Qwen3ForCausalLM"},
            "architectures is 'Qwen3ForCausalLM', this model needs 'LlamaForCausalLM'",
        ),
        ({"num_layers": 3}, "num_layers is 3, this model needs 2"),
        ({"num_head": 4}, "num_head is 4, this model needs 3"),
        ({"qmax": 127.0}, "qmax is 127.0, this model needs 448.0"),
        ({"scales_shape": [2, 3]}, r"scales_shape is \[2, 3\], this model needs \[2, 6\]"),
        ({"scales": [[1.0] * 6]}, r"the shape of scales is \[1, 6\], this model needs \[2, 6\]"),
        ({"scales": [[1.0] * 6, [1.0] * 5]}, "the shape of scales is"),
        ({"scales": [[1.0] * 6, [1.0] * 5 + [0.0]]}, "the scales of fp8 KV in layer 1 are"),
        ({"scales": [[1.0] * 6, [1.0] * 5 + [-1.0]]}, "scales are greater than 0"),
        ({"quant_type": "per_layer"}, "per_layer"),
        ({"scales": None}, "scales"),
    ],
)
def test_a_file_that_does_not_fit(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    write_file(path, "LlamaForCausalLM", "per_head", largest())
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        calibrate(layout(), MODEL, Stored({}), {"kv_quant_calibration_config_path": str(path)})


def test_the_type_of_the_file_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    write_file(path, "LlamaForCausalLM", "per_head", largest())
    options = {"kv_quant_calibration_config_path": str(path)}
    calibrate(layout(), MODEL, Stored({}), {**options, "llm_kv_type": "fp8kv_sph"})
    with pytest.raises(ConfigError, match="quant_type is 'per_head', this model needs 'per_tensor'"):
        calibrate(layout(), MODEL, Stored({}), {**options, "llm_kv_type": "fp8kv_spt"})


def test_files_that_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text('{"version": ')
    for name, why in (("none.json", "No such file"), ("wrong.json", "Input data was truncated")):
        with pytest.raises(ConfigError, match=f"--kv_quant_calibration_config_path .*{name}: .*{why}"):
            read_file(tmp_path / name, MODEL, HEADS)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.kv_scale", "self_attn.kv_scale"),
    ],
)
def test_scales_of_checkpoints(key: str, value: str, caplog: pytest.LogCaptureFixture) -> None:
    scales: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        scales |= {f"model.layers.{layer}.{name}": torch.tensor([layer + 0.5]) for name in (key, value)}
    scales["model.layers.0.self_attn.q_proj.output_scale"] = torch.tensor([9.0])
    filled = layout()
    calibrate(filled, MODEL, Stored(scales), {})
    for layer in range(LAYERS):
        assert torch.equal(torch.stack(filled.constants(layer)), torch.full((2, HEADS), layer + 0.5))
    assert not caplog.records


@pytest.mark.parametrize("names", [("self_attn.k_scale", "self_attn.v_scale"), ("self_attn.kv_scale",) * 2])
def test_an_engine_takes_them_beside_quantized_weights(names: tuple[str, str], folder: Path, tmp_path: Path) -> None:
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax() / 448
            tensors[name], tensors[f"{name}_scale"] = (tensor / scale).to(torch.float8_e4m3fn), scale.view(1)
        else:
            tensors[name] = tensor
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}": torch.tensor([0.01 * (layer + 1)]) for name in names}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    with LLM(tmp_path, ["llama", "quantization"], device="cpu", data_type="fp32", quant_policy="fp8") as llm:
        for layer, kv in llm.kv[0].kv.items():
            assert torch.equal(torch.stack(kv[2:]), torch.full((2, HEADS), 0.01 * (layer + 1)))
        assert llm.generate("The river", max_new_tokens=3)[0].token_ids


def test_a_checkpoint_may_have_a_scale_per_head() -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": largest()[layer, 0] for layer in range(2) for side in "kv"
    }
    filled = layout()
    calibrate(filled, MODEL, Stored(scales), {})
    assert torch.equal(filled.constants(1)[1], largest()[1, 0])


def test_without_scales_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    filled = layout()
    with caplog.at_level(logging.WARNING):
        calibrate(filled, MODEL, Stored({}), {})
    assert "fp8 KV has the scale 1" in caplog.text and "`llmcore calibrate` measures scales" in caplog.text
    assert all(torch.equal(scale, torch.ones(HEADS)) for layer in (0, 1) for scale in filled.constants(layer))


def test_scales_that_are_not_complete() -> None:
    half = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    with pytest.raises(ConfigError, match="has a scale for k of layer 0 alone"):
        stored_scales(Stored(half))
    one = {**half, "model.layers.0.self_attn.v_scale": torch.ones(1)}
    with pytest.raises(ConfigError, match="none for layer 1"):
        calibrate(layout(), MODEL, Stored(one), {})
    many = {f"model.layers.{layer}.self_attn.{side}_scale": torch.ones(2) for layer in range(2) for side in "kv"}
    with pytest.raises(ConfigError, match=r"in layer 0 are \[1.0, 1.0\]; the model has 3 KV heads"):
        calibrate(layout(), MODEL, Stored(many), {})
    nan = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([torch.nan])
        for layer in range(2)
        for side in "kv"
    }
    with pytest.raises(ConfigError, match="scales are greater than 0"):
        calibrate(layout(), MODEL, Stored(nan), {})
