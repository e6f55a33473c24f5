"""Readers of checkpoints: every format gives the weights that its tensors mean, with codes kept or dequantized."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import packers
import pytest
import torch
from llmcore.api import ConfigError
from llmcore.weights.quant import find_quantization
from llmcore.weights.source import open_checkpoint
from llmcore_devtools import check_plugin
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_quantization import checkpoint
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.model_format import READ
from opened import HOST, REGISTRY, Opened
from packers import CASES, Case, Tensors
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

LAYER = "model.layers.0."
Q, K, V = (f"{LAYER}self_attn.{name}_proj" for name in "qkv")
OUT, UP = f"{LAYER}self_attn.o_proj", f"{LAYER}mlp.up_proj"
SIZES = {Q: (64, 64), K: (32, 64), V: (32, 64), OUT: (64, 64), UP: (40, 192)}
OWN_ORDERS = "gptq, desc_act, an order for each"
LINEARS = ((Q, K, V), (OUT,), (UP,))


def weights() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    found = {f"{name}.weight": torch.randn(size, generator=generator) for name, size in SIZES.items()}
    more = {f"{UP}.bias": torch.randn(40, generator=generator), "lm_head.weight": torch.ones(9, 64)}
    return found | {"model.norm.weight": torch.ones(64)} | more


def saved(folder: Path, case: Case) -> tuple[Path, Tensors]:
    """A checkpoint of five linears, and what its weights are."""
    stored, means = packers.packed_model(weights(), case)
    return packers.write(folder, {"quantization_config": case.config}, stored), means


def no_scheme(case: Case) -> bool:
    return str(case.config.get("format")).startswith("mxfp4")


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_plain_weights(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, means = saved(tmp_path, case)
    for chunk in (1, 300, checkpoint.CHUNK):
        monkeypatch.setattr(checkpoint, "CHUNK", chunk)
        found = Opened(folder)
        assert found.tensors.keys() == means.keys()
        for name, wanted in means.items():
            assert torch.equal(found.tensors[name], wanted), name


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_canonical_tensors(case: Case, tmp_path: Path) -> None:
    folder, means = saved(tmp_path, case)
    found = Opened(folder, LINEARS)
    if no_scheme(case):
        assert found.schemes == [None] * 3 and f"{Q}.weight" in found.tensors
        return
    schemes = [scheme for scheme in found.schemes if scheme is not None]
    assert len(schemes) == len(LINEARS) - (case is CASES[OWN_ORDERS])
    kept = [module for linear, scheme in zip(LINEARS, found.schemes, strict=True) if scheme for module in linear]
    assert [module for module in SIZES if f"{module}.weight" not in found.tensors] == kept
    for module in kept:
        assert torch.equal(found.meaning(module), means[f"{module}.weight"]), module
    assert torch.equal(found.tensors[f"{UP}.bias"], means[f"{UP}.bias"])
    static = [scheme is not None and scheme.inputs == "static" for scheme in found.schemes]
    assert [f"{module}.input_scale" in found.tensors for module in (Q, OUT, UP)] == static


F16, BF16, F32 = ({"scale": name} for name in ("f16", "bf16", "f32"))
SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "awq": {"codes": "u4", "group": 32, "zeros": True} | F16,
    "awq, groups of 128 of 192 and 64 inputs": {"codes": "u4", "group": 64, "zeros": True} | F16,
    "awq, rows": {"codes": "u4", "zeros": True} | F16,
    "gptq": {"codes": "u4", "group": 32} | F16,
    "gptq, desc_act, asymmetric": {"codes": "u4", "group": 32, "zeros": True, "ordered": True} | F16,
    "gptq, 8 bits": {"codes": "i8", "group": 32} | F16,
    "ct, 4 bits, rows": {"codes": "u4"} | BF16,
    "ct, 4 bits, actorder": {"codes": "u4", "group": 32, "ordered": True} | BF16,
    "ct, 8 bits": {"codes": "i8"} | BF16,
    "ct, int8": {"codes": "i8", "inputs": "row"} | F32,
    "ct, int8, static": {"codes": "i8", "inputs": "static"} | F32,
    "ct, 4 bits in int8": {"codes": "i8", "inputs": "row"} | F32,
    "ct, fp8 per tensor": {"codes": "e4m3", "inputs": "static"} | F32,
    "ct, fp8 per channel": {"codes": "e4m3", "inputs": "row"} | F32,
    "ct, fp8 per block": {"codes": "e4m3", "inputs": "plain", "group": 32} | F32,
    "ct, fp8 per block, inputs too": {"codes": "e4m3", "inputs": "group", "group": 32} | F32,
    "fp8": {"codes": "e4m3", "inputs": "group", "group": 32} | F32,
    "fp8, blocks beyond the edges": {"codes": "e4m3", "inputs": "group", "group": 64} | F32,
    "autofp8": {"codes": "e4m3", "inputs": "static"} | F32,
    "autofp8, dynamic": {"codes": "e4m3", "inputs": "row"} | F32,
}


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes(name: str, tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, CASES[name])
    assert Opened(folder, [(UP,)]).schemes == [Scheme(**SCHEMES[name])]


@pytest.mark.parametrize("name", ["awq", "gptq, desc_act", "ct, 4 bits, asymmetric", "fp8", "ct, mxfp4"])
def test_half_types_are_rounded_once(name: str, tmp_path: Path) -> None:
    folder, means = saved(tmp_path, CASES[name])
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        found = Opened(folder, dtype=dtype)
        assert torch.equal(found.tensors[f"{UP}.weight"], means[f"{UP}.weight"].to(torch_dtype))


@pytest.mark.parametrize("name", ["gptq, desc_act, asymmetric", "fp8", "autofp8", "ct, 4 bits, actorder"])
@pytest.mark.parametrize("linears", [(), LINEARS], ids=["plain", "kept"])
def test_tensors_in_any_order_and_in_several_files(linears: Any, name: str, tmp_path: Path) -> None:
    stored, means = packers.packed_model(weights(), CASES[name])
    packers.write(tmp_path, {"quantization_config": CASES[name].config}, {})
    files: dict[str, Tensors] = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (tensor, value) in enumerate(sorted(stored.items())):
        files["ab"[index % 2] + ".safetensors"][tensor] = value.contiguous().clone()
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    names = {tensor: file for file, tensors in files.items() for tensor in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = Opened(tmp_path, linears)
    for module in SIZES:
        weight = found.meaning(module) if linears else found.tensors[f"{module}.weight"]
        assert torch.equal(weight, means[f"{module}.weight"])


# --- parts that differ -------------------------------------------------------------------------------------------


def mixed(folder: Path, cases: Mapping[str, Case], config: Mapping[str, Any]) -> tuple[Path, Tensors]:
    """A checkpoint whose modules are packed by different cases; a module without a case is plain."""
    stored, means = weights(), weights()
    for module, case in cases.items():
        leaves = case.pack(stored.pop(f"{module}.weight"))
        stored |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
        means[f"{module}.weight"] = case.meaning(leaves)
    return packers.write(folder, {"quantization_config": config}, stored), means


def test_stacked_modules_that_differ_become_plain(tmp_path: Path) -> None:
    four, eight = packers.ct_words(), packers.ct_words(8)
    groups = four.config["config_groups"]["group_0"], eight.config["config_groups"]["group_0"]
    named = {"eight": {**groups[1], "targets": [r"re:.*\.(v|o)_proj"]}, "four": groups[0]}
    config = {**four.config, "config_groups": named, "format": "mixed-precision"}
    folder, means = mixed(tmp_path, {Q: four, K: four, V: eight, OUT: eight, UP: four}, config)
    found = Opened(folder, LINEARS)
    codes = [scheme and scheme.codes for scheme in found.schemes]
    assert codes == [None, "i8", "u4"]
    for module in (Q, K, V):
        assert torch.equal(found.tensors[f"{module}.weight"], means[f"{module}.weight"])
    for module in (OUT, UP):
        assert torch.equal(found.meaning(module), means[f"{module}.weight"])


def test_gptq_overrides_single_modules(tmp_path: Path) -> None:
    four, eight = packers.gptq(), packers.gptq(8, 64, sym=False)
    dynamic = {r"-:.*k_proj": {}, r"+:.*\.[vo]_proj": {"bits": 8, "group_size": 64, "sym": False}}
    folder, means = mixed(tmp_path, {Q: four, V: eight, OUT: eight, UP: four}, {**four.config, "dynamic": dynamic})
    found = Opened(folder, LINEARS)
    assert found.schemes[0] is None and found.schemes[1] == Scheme(codes="i8", zeros=True)
    assert torch.equal(found.meaning(OUT), means[f"{OUT}.weight"])
    for module in (Q, K, V):
        assert torch.equal(found.tensors[f"{module}.weight"], means[f"{module}.weight"])


def test_stacked_modules_of_other_orders_become_plain(tmp_path: Path) -> None:
    folder, means = saved(tmp_path, CASES[OWN_ORDERS])
    found = Opened(folder, LINEARS)
    assert found.schemes[0] is None and found.schemes[1] is not None
    for module in (Q, K, V):
        assert torch.equal(found.tensors[f"{module}.weight"], means[f"{module}.weight"])


@pytest.mark.parametrize("name", ["awq", "gptq", "ct, 4 bits", "fp8"])
def test_headers_say_which_modules_are_quantized(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder, _ = mixed(tmp_path, {Q: case, K: case, V: case, UP: case}, case.config)
    found = Opened(folder, LINEARS)
    assert [scheme is not None for scheme in found.schemes] == [True, False, True]
    assert torch.equal(found.tensors[f"{OUT}.weight"], weights()[f"{OUT}.weight"])


def test_constants_of_the_kv_cache_are_left_out(tmp_path: Path) -> None:
    for name, leaves in (("ct, fp8 per channel", ("k_scale", "v_scale")), ("autofp8", ("kv_scale",))):
        stored, _ = packers.packed_model(weights(), CASES[name])
        stored |= {f"{LAYER}self_attn.{leaf}": torch.ones(1) for leaf in leaves}
        stored |= {f"{K}.output_scale": torch.ones(1)} if name == "autofp8" else {}
        found = Opened(packers.write(tmp_path / name, {"quantization_config": CASES[name].config}, stored), LINEARS)
        assert not any(tensor.endswith(("k_scale", "v_scale", "output_scale")) for tensor in found.tensors)


@pytest.mark.parametrize(
    "config",
    [
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        },
        {"quant_method": "modelopt", "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
    ],
)
def test_weights_are_plain_if_only_kv_is_quantized(config: Mapping[str, Any], tmp_path: Path) -> None:
    stored = weights() | {f"{LAYER}self_attn.k_scale": torch.ones(1)}
    found = Opened(packers.write(tmp_path, {"quantization_config": config}, stored), LINEARS)
    assert found.schemes == [None] * 3 and found.tensors.keys() == weights().keys()


def test_inputs_that_no_op_quantizes_so_are_multiplied_as_they_are(tmp_path: Path) -> None:
    case = packers.ct_words(8)
    group = case.config["config_groups"]["group_0"]
    for more in ({}, {"strategy": "tensor", "dynamic": False}, {"symmetric": False}):
        inputs = {**packers.activations("int", False), **more}
        config = {**case.config, "config_groups": {"a": {**group, "input_activations": inputs}}}
        folder, means = mixed(tmp_path, dict.fromkeys(SIZES, case), config)
        found = Opened(folder, LINEARS)
        assert found.schemes[1] == Scheme(codes="i8", group=32, scale="bf16")
        assert torch.equal(found.meaning(UP), means[f"{UP}.weight"])


# --- single formats ----------------------------------------------------------------------------------------------


def test_zero_points_of_compressed_tensors_may_be_bytes(tmp_path: Path) -> None:
    case = packers.ct_words(sym=False)
    stored, means = packers.packed_model(weights(), case)
    for module, (outputs, _) in SIZES.items():
        name = f"{module}.weight_zero_point"
        stored[name] = (packers.field(stored[name], 4, 0, outputs) - 8).to(torch.int8)
    folder = packers.write(tmp_path, {"quantization_config": case.config}, stored)
    assert torch.equal(Opened(folder, LINEARS).meaning(UP), means[f"{UP}.weight"])


def test_zero_0_of_gptq_wraps_around(tmp_path: Path) -> None:
    """Version 1 stores z - 1, so 15 means 0. A sum over whole words would carry into the next zero."""
    case = packers.gptq(sym=False)
    stored, _ = packers.packed_model(weights(), case)
    stored[f"{UP}.qzeros"] = torch.full_like(stored[f"{UP}.qzeros"], -1)
    folder = packers.write(tmp_path, {"quantization_config": case.config}, stored)
    assert not Opened(folder, LINEARS).tensors[f"{UP}.zero"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_scales_of_other_types(dtype: torch.dtype, tmp_path: Path) -> None:
    weight, scale = torch.full((3, 40), 2.0).to(torch.float8_e4m3fn), torch.tensor([[0.5, 4.0]])
    tensors = {f"{UP}.weight": weight, f"{UP}.weight_scale_inv": scale.to(dtype)}
    folder = packers.write(tmp_path, {"quantization_config": CASES["fp8"].config}, tensors)
    assert Opened(folder).tensors[f"{UP}.weight"][0].tolist() == [1.0] * 32 + [8.0] * 8


def test_fp8_is_that_of_transformers(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, CASES["fp8"])
    stored, found = load_file(folder / "model.safetensors"), Opened(folder)
    theirs = Fp8Dequantize(None)  # type: ignore[no-untyped-call]
    for module in SIZES.keys() - {UP}:  # they read no blocks beyond the edges
        leaves = {leaf: stored[f"{module}.{leaf}"] for leaf in ("weight", "weight_scale_inv")}
        expected = theirs.convert(leaves)["weight"]
        # transformers 5.17 returns a list of one
        expected = expected[0] if isinstance(expected, list) else expected
        assert torch.equal(found.tensors[f"{module}.weight"], expected)


def test_transformers_names_of_static_fp8(tmp_path: Path) -> None:
    case = CASES["autofp8"]
    stored, means = packers.packed_model(weights(), case)
    renamed = {
        name.replace("weight_scale", "weight_scale_inv").replace("input_scale", "activation_scale"): tensor
        for name, tensor in stored.items()
    }
    found = Opened(packers.write(tmp_path, {"quantization_config": case.config}, renamed), LINEARS)
    assert torch.equal(found.meaning(UP), means[f"{UP}.weight"])
    assert torch.equal(found.tensors[f"{UP}.input_scale"], stored[f"{UP}.input_scale"].view(1))


def test_fp8_of_modelopt(tmp_path: Path) -> None:
    stored, means = packers.packed_model(weights(), CASES["autofp8"])
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    for config in ({"quant_method": "modelopt", "quantization": inner}, {"quant_method": "modelopt", **inner}):
        found = Opened(packers.write(tmp_path, {"quantization_config": config}, stored), LINEARS)
        assert torch.equal(found.meaning(UP), means[f"{UP}.weight"])
        assert found.schemes[2] == Scheme(codes="e4m3", scale="f32", inputs="static")


def test_gpt_oss_experts_are_those_of_transformers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 24, 64, generator=generator)
    leaves = packers.pack_mx("_blocks", "_scales", weight)
    blocks, scales = leaves["_blocks"].view(3, 24, 2, 16), leaves["_scales"]
    name = f"{LAYER}mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.ones(3, 24)}
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    found = Opened(packers.write(tmp_path, {"quantization_config": config}, tensors), [(OUT,)])
    assert found.tensors.keys() == {name, f"{name}_bias"} and found.schemes == [None]
    assert torch.equal(found.tensors[name], convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    assert (found.tensors[name].transpose(1, 2) - weight).abs().max() <= weight.abs().max() / 4


# --- without weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_config_alone_says_what_will_be_packed(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": case.config}))
    stored = open_checkpoint(REGISTRY, tmp_path, weights=False)
    found = find_quantization(REGISTRY, stored.config(), CONFIG)
    assert found is not None
    method: Any = found.method
    assert method.checkpoint(stored, HOST).sizes() == {}
    assert method.method_for(("lm_head",)) is None
    linear, stacked = method.method_for((UP,)), method.method_for((Q, K, V))
    assert (linear is None, stacked is None) == (no_scheme(case), no_scheme(case))
    if name in SCHEMES and "128" not in name and "beyond" not in name:
        wanted = {**SCHEMES[name], "scale": linear.scheme.scale}
        assert linear.scheme == Scheme(**wanted)


LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "awq": {"modules_to_not_convert": ["up_proj"]},
    "gptq": {"dynamic": {"-:.*up_proj": {}}},
    "ct, 4 bits": {"ignore": ["re:.*up_proj"]},
    "fp8": {"modules_to_not_convert": [UP]},
    "autofp8": {"ignored_layers": [UP]},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_config_alone_leaves_modules_plain(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {**CASES[name].config, **LEFT_OUT[name]}})
    )
    stored = open_checkpoint(REGISTRY, tmp_path, weights=False)
    found = find_quantization(REGISTRY, stored.config(), CONFIG)
    assert found is not None
    method: Any = found.method
    method.checkpoint(stored, HOST)
    assert method.method_for((UP,)) is None and method.method_for((OUT,)) is not None


# --- what is wrong -----------------------------------------------------------------------------------------------

Change = Callable[[Tensors], None]


def without(leaf: str) -> Change:
    def change(stored: Tensors) -> None:
        del stored[f"{UP}.{leaf}"]

    return change


def changed(leaf: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(stored: Tensors) -> None:
        stored[f"{UP}.{leaf}"] = how(stored.get(f"{UP}.{leaf}", torch.empty(0)))

    return change


def nothing(stored: Tensors) -> None:
    pass


def all_plain(stored: Tensors) -> None:
    stored.clear()
    stored.update(weights())


def put(row: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[row] = value
        return tensor

    return change


GROUP_0 = packers.ct_words().config["config_groups"]["group_0"]


def ct_weights(**more: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {**GROUP_0, "weights": {**GROUP_0["weights"], **more}}}}


WRONG: Sequence[tuple[str, Mapping[str, Any], Change, str]] = [
    (
        "awq",
        {"group_size": 64},
        nothing,
        r"scales is F16 .*of which 1 x 64 share a scale, it has to be .*; correct quantization_config",
    ),
    ("awq", {"group_size": 0}, nothing, "group_size in quantization_config is 0; it has to be a number of inputs"),
    (
        "awq",
        {"bits": 3},
        nothing,
        "bits in quantization_config is 3, and no op multiplies codes of that width; awq is read with 4",
    ),
    (
        "awq",
        {"version": "gemv"},
        nothing,
        "'gemv', and its words are ordered for one CUDA kernel; awq is read with gemm",
    ),
    ("awq", {"version": "exllama"}, nothing, "version .* is 'exllama', and its words are ordered for one CUDA kernel"),
    ("awq", {"backend": "llm-awq"}, nothing, "'llm-awq', which orders its words .* AutoAWQ saved with version gemm"),
    ("awq", {}, without("scales"), r"lacks .*up_proj.scales \[6, 40\], without which"),
    ("awq", {}, without("qzeros"), r"lacks .*up_proj.qzeros \[6, 5\]"),
    ("awq", {}, without("qweight"), "lacks .*up_proj.qweight, and has other tensors of that module"),
    ("awq", {}, changed("qweight", lambda t: t[:100]), r"has to be F16 or BF16 or F32 \[4, 40\]"),
    ("awq", {}, changed("qweight", lambda t: t.float()), r"qweight is F32 .* has to be I32"),
    ("awq", {}, changed("qweight", lambda t: t.flatten()), r"qweight is I32 \[960\] and has to be a matrix"),
    ("awq", {}, changed("scales", put(0, float("nan"))), "up_proj.scales has numbers that are not finite"),
    ("awq", {}, all_plain, "quantized with 'awq', and no tensor is; remove its quantization_config"),
    ("awq", {"modules_to_not_convert": "lm_head"}, nothing, "modules_to_not_convert .* has to be a list of names"),
    ("gptq", {"bits": 3}, nothing, "bits in quantization_config is 3, and no op .*; gptq is read with 4 or 8"),
    ("gptq", {"bits": 2}, nothing, "bits in quantization_config is 2"),
    ("gptq", {"bits": 4.0}, nothing, "bits in quantization_config is 4.0"),
    ("gptq", {"bits": None}, nothing, "lacks bits; add the bits of a weight"),
    ("gptq", {"dynamic": [1]}, nothing, r"dynamic in quantization_config is \[1\] and has to be an object"),
    ("gptq", {"bits": 8}, nothing, "quantization_config"),
    ("gptq", {"dynamic": {".*": {"bits": 3}}}, nothing, "bits in quantization_config is 3"),
    ("gptq", {"dynamic": {"+:(": {}}}, nothing, r"'\(' in quantization_config is not a regular expression"),
    (
        "gptq",
        {"checkpoint_format": "marlin"},
        nothing,
        "'marlin', and its words are ordered .* read with gptq or gptq_v2",
    ),
    ("gptq", {"checkpoint_format": "bitblas"}, nothing, "'bitblas', and its words are ordered"),
    ("gptq", {"checkpoint_format": "gptq_v2"}, nothing, "has the zero point 7, and with sym every one is 8; set sym"),
    ("gptq", {"group_size": 128}, nothing, r"quantization_config"),
    ("gptq", {}, changed("qzeros", put(0, 5)), "zero point 6, and with sym every one is 8"),
    ("gptq", {"desc_act": True}, without("g_idx"), "lacks .*g_idx, the group of each input, .* set desc_act to false"),
    ("gptq", {}, changed("g_idx", put(3, 99)), "g_idx does not put 32 inputs into each of the groups 0 to 5"),
    ("gptq", {}, changed("g_idx", lambda t: t[:5]), r"g_idx is \[5\]; it has to be the group of each of 192 inputs"),
    ("ct, 4 bits", ct_weights(num_bits=3), nothing, "type 'int' with num_bits 3; this format is read with int of 4"),
    ("ct, 4 bits", ct_weights(group_size=64), nothing, r"weight_scale is BF16 \[\d+, \d\]"),
    ("ct, 4 bits", ct_weights(num_bits=8), nothing, "quantization_config"),
    ("ct, 4 bits", ct_weights(symmetric=False), nothing, "lacks .*weight_zero_point"),
    (
        "ct, 4 bits",
        {"format": "marlin-24"},
        nothing,
        "format in quantization_config is 'marlin-24', and its words are ordered .*; compressed-tensors is read with",
    ),
    ("ct, 4 bits", {"format": "nvfp4-pack-quantized"}, nothing, "'nvfp4-pack-quantized', and its float8 scales of 16"),
    (
        "ct, 4 bits",
        {"config_groups": {"a": {**GROUP_0, "format": "nvfp4-pack-quantized"}}},
        nothing,
        "'nvfp4-pack-quantized', and its float8 scales .*; compressed-tensors' a is read with pack-quantized",
    ),
    (
        "ct, mxfp4",
        {},
        changed("weight_global_scale", lambda t: torch.ones(1)),
        "is quantized as nvfp4, and its float8",
    ),
    ("ct, 4 bits", {"sparsity_config": {"format": "sparse-24-bitmask"}}, nothing, "'sparse-24-bitmask'"),
    ("ct, 4 bits", {"transform_config": {"config_groups": {"u": {}}}}, nothing, "rotates the inputs of linears"),
    ("ct, 4 bits", {"config_groups": {}}, nothing, "has no config_groups"),
    (
        "ct, 4 bits",
        {"config_groups": {"W4A16": ["Linear"]}},
        nothing,
        r"W4A16 .* is \['Linear'\] and has to be an object",
    ),
    ("ct, 4 bits", {"sparsity_config": "dense"}, nothing, "sparsity_config .* 'dense' and has to be an object"),
    (
        "ct, int8",
        {"config_groups": {"a": {**GROUP_0, "input_activations": 8}}},
        nothing,
        "input_activations .* is 8 and",
    ),
    ("ct, 4 bits", {}, changed("weight", lambda t: torch.ones(40, 192)), "up_proj has both weight and weight_packed"),
    ("ct, 4 bits", {"config_groups": {"a": {**GROUP_0, "targets": [Q]}}}, nothing, "no targets .* name it"),
    ("ct, 4 bits", {}, changed("weight_shape", put(1, 7)), r"weight_shape is \[40, 7\]; .* room for 192 inputs"),
    ("ct, int8", {"config_groups": {"group_0": GROUP_0}}, nothing, "is quantized as i8, and group_0 .* says u4"),
    ("ct, int8, static", {}, without("input_scale"), r"lacks .*input_scale \[\] or \[1\]"),
    ("ct, int8", {}, without("weight_scale"), r"lacks .*weight_scale \[40, 1\] or \[40\]"),
    ("fp8", {"weight_block_size": [128]}, nothing, r"weight_block_size .* is \[128\]; it has to be \[rows, columns\]"),
    ("fp8", {"weight_block_size": [0, 128]}, nothing, r"is \[0, 128\]"),
    ("fp8", {"weight_block_size": [128, 128]}, nothing, r"weight_scale_inv is F32 \[\d+, \d\], .* has to be"),
    ("fp8", {"fmt": "e5m2"}, nothing, "fmt in quantization_config is 'e5m2'; fp8 is read with e4m3"),
    ("fp8", {"activation_scheme": "static"}, nothing, "a scale per block are read with 'dynamic' only"),
    ("fp8", {}, without("weight_scale_inv"), r"lacks .*weight_scale_inv \[3, 6\]"),
    ("fp8", {}, changed("weight", lambda t: t.float().to(torch.float8_e5m2)), "F8_E5M2 .* has to be F8_E4M3"),
    ("autofp8", {}, without("weight_scale"), r"lacks .*weight_scale \[1, 1\] or \[1\] or \[\]"),
    ("autofp8", {}, without("input_scale"), "lacks .*input_scale"),
    ("autofp8", {}, changed("input_scale", torch.zeros_like), "up_proj.input_scale is 0.0 and has to be above 0"),
    ("autofp8", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nothing, "quant_algo .* 'NVFP4', and its float8"),
    (
        "autofp8",
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        nothing,
        "is 'W4A8_AWQ'; ModelOpt is read with fp8",
    ),
]


def test_inputs_that_were_not_sorted(tmp_path: Path) -> None:
    """compressed-tensors fills weight_g_idx with -1 then. Its numbers may be saved in any type."""
    stored, means = packers.packed_model(weights(), CASES["ct, 4 bits"])
    changed("weight_g_idx", lambda t: torch.full((192,), -1))(stored)
    changed("weight_shape", lambda t: t.float())(stored)
    packers.write(tmp_path, {"quantization_config": CASES["ct, 4 bits"].config}, stored)
    assert torch.equal(Opened(tmp_path, LINEARS).meaning(UP), means[f"{UP}.weight"])


@pytest.mark.parametrize(("name", "config", "change", "message"), WRONG)
def test_malformed(name: str, config: Mapping[str, Any], change: Change, message: str, tmp_path: Path) -> None:
    stored, _ = packers.packed_model(weights(), CASES[name])
    change(stored)
    packers.write(tmp_path, {"quantization_config": {**CASES[name].config, **config}}, stored)
    with pytest.raises(ConfigError, match=message):
        Opened(tmp_path, LINEARS)


UNREAD: Sequence[Mapping[str, Any]] = (
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "hqq"},
    {"quant_method": "quanto", "weights": "int4"},
    {"bits": 4, "group_size": 128},
)


@pytest.mark.parametrize("quantization", UNREAD)
def test_methods_that_are_not_read(quantization: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"for which no plugin brings a method .*; install .* unquantized") as told:
        find_quantization(REGISTRY, {"quantization_config": quantization}, CONFIG)
    method = quantization.get("quant_method")
    assert (repr(method) if method else "without quant_method") in str(told.value)
    assert all(f"{name}: {summary}" in str(told.value) for name, summary in READ.items())


def test_zero_points_out_of_range(tmp_path: Path) -> None:
    case = packers.ct_words(sym=False)
    stored, _ = packers.packed_model(weights(), case)
    stored[f"{UP}.weight_zero_point"] = torch.full((40, 6), 8, dtype=torch.int8)
    packers.write(tmp_path, {"quantization_config": case.config}, stored)
    with pytest.raises(ConfigError, match="zero points from 8 to 8; 4 bits have -8 to 7; correct quantization_config"):
        Opened(tmp_path, LINEARS)


def test_truncated_file(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, CASES["gptq"])
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model.safetensors is cut short .* download it again"):
        Opened(folder)


def test_experts_of_gpt_oss_without_blocks(tmp_path: Path) -> None:
    tensors = {f"{LAYER}mlp.experts.down_proj_scales": torch.zeros(2, 4, 1, dtype=torch.uint8)}
    packers.write(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}}, tensors)
    with pytest.raises(ConfigError, match="down_proj_blocks is not there; it has to be"):
        Opened(tmp_path)


def test_the_contracts_are_kept(tmp_path: Path) -> None:
    folders = [saved(tmp_path / str(index), case)[0] for index, case in enumerate(CASES.values())]
    assert check_plugin(REGISTRY, "quantization", folders)["register_quant_methods"] >= len(READ)
