"""Quantized experts, of a checkpoint or at load: they are held as codes, and give the logits of what these mean."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import packers
import pytest
import torch
from llmcore.api import ConfigError, DeviceInfo, RouteSpec
from llmcore.cli import main
from llmcore.layers import Build, Mesh, MoE, create_linears
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.family import assert_same, oracle, small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.experts import QuantizedExperts
from llmcore_quantization.ops import moe_experts_w4a16 as experts
from packers import CASES
from safetensors.torch import load_file
from torch import nn
from witness import MODES, rounded_model

REGISTRY = registry_for_tests()
EXPERTS = 8
EXPERT = re.compile(r"\.(experts\.\d+|shared_experts?)\.")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {},
    "Qwen2MoeForCausalLM": {"shared_expert_intermediate_size": 64},
    "Qwen3MoeForCausalLM": {},
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
}
PROMPT = [5, 99, 3, 77, 20, 41, 8, 11, 64, 2]
"""Its pairs are more than the experts; those of a decoded token are fewer."""


def saved(folder: Path, architecture: str, case: packers.Case, **sizes: Any) -> tuple[Path, Path]:
    """A checkpoint with packed experts, and one with the weights that they mean."""
    small_model(architecture, **SIZES | FAMILIES[architecture] | sizes).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    stored, means = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = means[name] = tensor
        if EXPERT.search(name):
            leaves, module = case.pack(stored.pop(name)), name.removesuffix(".weight")
            stored |= {f"{module}.{leaf}": part for leaf, part in leaves.items()}
            means[name] = case.meaning(leaves)
    quantized = config | {"quantization_config": case.config}
    return packers.write(folder / "packed", quantized, stored), packers.write(folder / "plain", config, means)


FORMATS = ("awq", "gptq", "ct, 4 bits, asymmetric", "ct, int8, static", "fp8", "gptq, desc_act")


STORED = [(name, family) for name in FORMATS for family in ("Qwen3MoeForCausalLM", "MixtralForCausalLM")]


@pytest.mark.parametrize(("name", "architecture"), STORED)
def test_logits_are_those_of_the_weights_that_the_codes_mean(name: str, architecture: str, tmp_path: Path) -> None:
    packed, plain = (LoadedModel(path, registry=REGISTRY) for path in saved(tmp_path, architecture, CASES[name]))
    leaves = held(packed, ".experts.")
    if "desc_act" in name:
        assert leaves == {"gate_up_proj", "down_proj"}
    else:
        assert leaves >= CODES and not any("input_scale" in leaf for leaf in leaves)
        assert packed.weight_bytes < 0.6 * plain.weight_bytes
    for new, chunk in ((3, None), (1, 3)):
        got, wanted = packed.generate(PROMPT, new, chunk=chunk), plain.generate(PROMPT, new, chunk=chunk)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-4)


CODES = {"gate_up_proj_codes", "gate_up_proj_scale", "down_proj_codes", "down_proj_scale"}


def held(model: LoadedModel, within: str) -> set[str]:
    """The parameters' names after `within`."""
    return {path.partition(within)[2] for path, _ in model.model.named_parameters() if within in path}


SHARED = [
    ("awq", "DeepseekV3ForCausalLM"),
    ("gptq", "Qwen2MoeForCausalLM"),
    ("gptq, desc_act", "DeepseekV2ForCausalLM"),
    ("fp8", "DeepseekV3ForCausalLM"),
]


@pytest.mark.parametrize(("name", "architecture"), SHARED)
def test_an_mlp_that_all_tokens_see_keeps_its_codes(name: str, architecture: str, tmp_path: Path) -> None:
    packed, plain = (LoadedModel(path, registry=REGISTRY) for path in saved(tmp_path, architecture, CASES[name]))
    within = ".shared_expert." if "Qwen2" in architecture else ".shared_experts."
    assert held(packed, within) >= {"gate_up_proj.codes", "gate_up_proj.scale", "down_proj.codes", "down_proj.scale"}
    got, wanted = (torch.stack(model.generate(PROMPT, 2).logits) for model in (packed, plain))
    # Its inputs are rounded too if the format says so.
    error = float((got - wanted).norm() / wanted.norm())
    assert error < (1e-4 if CASES[name].inputs == "plain" else 5e-2), error


def test_plain_weights_of_an_mlp_that_all_tokens_see_stay_in_one_op(tmp_path: Path) -> None:
    """Unless one of its two linears is quantized; then the other is a plain linear."""
    theirs = small_model("DeepseekV3ForCausalLM", **SIZES | LATENT)
    theirs.save_pretrained(tmp_path)
    plain, mixed = (LoadedModel(tmp_path, modes=modes, registry=REGISTRY) for modes in ((), ("ppl_w8a8_mixdown",)))
    assert held(plain, ".shared_experts.") == {"gate_up_proj.weight", "down_proj.weight"}
    assert held(mixed, ".shared_experts.") == {"gate_up_proj.codes", "gate_up_proj.scale", "down_proj.weight"}
    fused = [r.context.shape for r in plain.build.resolutions if r.context.op == "moe.fused"]
    assert {shape["shared"] for shape in fused} == {128}
    got, wanted = (torch.stack(model.generate(PROMPT, 2).logits) for model in (mixed, plain))
    assert float((got - wanted).norm() / wanted.norm()) < 5e-2


ONLINE = [
    ("MixtralForCausalLM", "triton_w4a16 g32"),
    ("Qwen2MoeForCausalLM", "triton_w8a16"),
    ("Qwen3MoeForCausalLM", "ppl_w4a16 g64"),
    ("DeepseekV2ForCausalLM", "triton_w4a16 g32"),
    ("DeepseekV3ForCausalLM", "triton_w8a16"),
]


@pytest.mark.parametrize(("architecture", "modes"), ONLINE)
def test_experts_are_quantized_at_load_and_routers_are_not(architecture: str, modes: str, tmp_path: Path) -> None:
    theirs = small_model(architecture, **SIZES | FAMILIES[architecture])
    theirs.save_pretrained(tmp_path)
    ours = LoadedModel(tmp_path, modes=modes.split(), registry=REGISTRY)
    plain = {"gate.weight", "gate.e_score_correction_bias", "shared_expert_gate.weight"}
    block = ".block_sparse_moe." if "Mixtral" in architecture else ".layers.1.mlp."
    for leaf in held(ours, block.removeprefix(".")):
        assert (leaf in plain) == (not leaf.endswith(("codes", "scale", "zero"))), leaf
    assert held(ours, ".experts.") >= CODES
    rounded = rounded_model(theirs, MODES[modes], plain=("kv_b_proj", "shared_expert_gate"))
    for new, chunk in ((4, None), (1, 4)):
        assert_same(modes, ours.generate(PROMPT, new, chunk=chunk), oracle(rounded, PROMPT, new), 1e-4)


def test_experts_in_float8_have_blocks_and_their_inputs_stay(tmp_path: Path) -> None:
    more = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    theirs = small_model("Qwen3MoeForCausalLM", **SIZES | more, head_dim=16)
    theirs.save_pretrained(tmp_path)
    for modes in ("fp8w8a8_b128", "triton_w8a8"):
        ours = LoadedModel(tmp_path, modes=[modes], registry=REGISTRY)
        assert held(ours, ".experts.") == CODES
        got = ours.generate(PROMPT, 1).logits[0]
        wanted = oracle(rounded_model(copy.deepcopy(theirs), MODES[modes]), PROMPT, 1).logits[0]
        assert (got - wanted).norm() / wanted.norm() < 2e-2


def test_groups_that_do_not_divide_an_experts_inputs_name_those_that_do(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 128, "moe_intermediate_size": 192}
    small_model("Qwen3MoeForCausalLM", **sizes, head_dim=16).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"experts\.down_proj: groups of 128 inputs do not divide 192; groups of 64 or 32 do"
    ):
        LoadedModel(tmp_path, modes=["triton_w4a16"], registry=REGISTRY)


@pytest.mark.parametrize("modes", ["triton_w4a16 g32", "fp8w8a8"])
def test_the_plan_counts_codes_of_experts(modes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 2 % of what is loaded; almost all weights are experts' here."""
    sizes = SIZES | {"hidden_size": 128, "head_dim": 16, "num_experts": 32, "moe_intermediate_size": 128}
    small_model("Qwen3MoeForCausalLM", **sizes, vocab_size=32).save_pretrained(tmp_path)
    arguments = ["plan", str(tmp_path), "--device", "cpu", "--data_type", "bf16", "--mode", *modes.split()]
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit, match="0"):
            main([*arguments, *more])
    said, _, found = capsys.readouterr().out.partition("\n{")
    budget = json.loads("{" + found)["budget"]
    held = LoadedModel(tmp_path, modes=modes.split(), registry=REGISTRY, data_type="bf16").weight_bytes
    assert budget["weights"] == pytest.approx(held, rel=0.02)
    assert f"{budget['bits_per_weight']:.2f} bits per weight through online_" in said
    # a scale and a zero take 24 bits for 32 weights, a scale 32 bits for 128
    assert budget["bits_per_weight"] == pytest.approx(4.75 if "w4a16" in modes else 8.25, abs=0.2)


def test_few_experts_are_dequantized_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU only those that have tokens, each once."""
    small_model("MixtralForCausalLM", **SIZES).save_pretrained(tmp_path)
    whole = LoadedModel(tmp_path, modes=["triton_w8a16"], registry=REGISTRY).generate(PROMPT, 2)
    monkeypatch.setattr(experts, "AT_A_TIME", 2 * 3 * 64 * 64)
    monkeypatch.setattr(experts, "CHUNK", 64 * 40)
    seen: list[tuple[int, ...]] = []
    one = experts._dequantize

    def watched(stack: Any, chosen: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(tuple(chosen.tolist()))
        one(stack, chosen, out)

    monkeypatch.setattr(experts, "_dequantize", watched)
    ours = LoadedModel(tmp_path, modes=["triton_w8a16"], registry=REGISTRY)
    parts = ours.generate(PROMPT, 2)
    torch.testing.assert_close(torch.stack(parts.logits), torch.stack(whole.logits), rtol=1e-6, atol=1e-6)
    decoded = seen[-2 * 3 :]  # two stacks in each of three layers, for one token with two experts
    assert all(len(chosen) == 2 for chosen in seen) and [*decoded[::2]] == [*decoded[1::2]]
    assert len(seen) <= 2 * 3 * (EXPERTS // 2 + 1)


def test_drawn_experts_have_random_codes(tmp_path: Path) -> None:
    config = small_model("Qwen3MoeForCausalLM", **SIZES).config.to_dict()
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": CASES["awq"].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drawn = LoadedModel(tmp_path, registry=REGISTRY, dummy=True)
    assert len(drawn.model.get_submodule("layers.0.mlp.experts").gate_up_proj_codes.unique()) == 256
    assert bool(drawn.all_logits(PROMPT).isfinite().all())


@pytest.mark.parametrize("inner", [64, 96, 256])
def test_drawn_experts_are_held_as_those_of_the_checkpoint(inner: int, tmp_path: Path) -> None:
    """Groups of 128 inputs are 64 or fewer where they do not divide; experts whose stacks then differ are plain."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": inner}
    case = CASES["awq, groups of 128 of 192 and 64 inputs"]
    folder, _ = saved(tmp_path, "Qwen3MoeForCausalLM", case, **sizes)
    loaded = LoadedModel(folder, registry=REGISTRY)
    (folder / "model.safetensors").unlink()
    drawn = LoadedModel(folder, registry=REGISTRY, dummy=True)
    shapes = [
        {path: tensor.shape for path, tensor in model.model.named_parameters() if ".experts." in path}
        for model in (drawn, loaded)
    ]
    assert shapes[0] == shapes[1] and len(shapes[0]) >= 2


def created(ranks: int, scheme: Scheme) -> MoE:
    build = Build(
        registry=REGISTRY,
        config=CONFIG,
        device=DeviceInfo("cpu"),
        torch_device=torch.device("cpu"),
        mesh=Mesh({"moe_tp": ranks}),
    )
    whole = nn.Module()
    whole.mlp = MoE(build, 64, 96, RouteSpec(experts=2, top_k=1))
    create_linears(whole, experts_for=lambda modules: QuantizedExperts(scheme))
    return whole.mlp


def test_ranks_hold_whole_groups_of_their_part_of_each_expert() -> None:
    """96 inputs of down are three groups of 32, which three ranks share and two do not."""
    scheme = Scheme(codes="u4", group=32, zeros=True)
    held = {name: tuple(parameter.shape) for name, parameter in created(3, scheme).experts.named_parameters()}
    assert held == {
        "gate_up_proj_codes": (2 * 2 * 32, 32),
        "gate_up_proj_scale": (2 * 2 * 32, 2),
        "gate_up_proj_zero": (2 * 2 * 32, 2),
        "down_proj_codes": (2 * 64, 16),
        "down_proj_scale": (2 * 64, 1),
        "down_proj_zero": (2 * 64, 1),
    }
    with pytest.raises(
        ConfigError, match=r"96 inputs of mlp.* 2 ranks of moe_tp in multiples of 32, .* --tp can be 1, 3$"
    ):
        created(2, scheme)
