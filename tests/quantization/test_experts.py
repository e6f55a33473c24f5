"""Experts of quantized checkpoints: their codes are kept, and give the logits of the weights that they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import packers
import pytest
import torch
from llmcore.api import ConfigError, DeviceInfo, RouteSpec
from llmcore.layers import Build, Mesh, MoE, create_linears
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.experts import QuantizedExperts
from packers import CASES
from safetensors.torch import load_file
from torch import nn

REGISTRY = registry_for_tests()
EXPERTS = 8
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
PROMPT = [5, 99, 3, 77, 20, 41, 8, 11, 64, 2]
"""Its pairs are more than the experts; those of a decoded token are fewer."""


def saved(folder: Path, architecture: str, case: packers.Case) -> tuple[Path, Path]:
    """A checkpoint with packed experts, and one with the weights that they mean."""
    small_model(architecture, **SIZES).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    stored, means = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = means[name] = tensor
        if ".experts." in name:
            leaves, module = case.pack(stored.pop(name)), name.removesuffix(".weight")
            stored |= {f"{module}.{leaf}": part for leaf, part in leaves.items()}
            means[name] = case.meaning(leaves)
    quantized = config | {"quantization_config": case.config}
    return packers.write(folder / "packed", quantized, stored), packers.write(folder / "plain", config, means)


FORMATS = ("awq", "gptq", "ct, 4 bits, asymmetric", "ct, int8, static", "fp8", "gptq, desc_act")


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_that_the_codes_mean(name: str, architecture: str, tmp_path: Path) -> None:
    packed, plain = (LoadedModel(path, registry=REGISTRY) for path in saved(tmp_path, architecture, CASES[name]))
    held = {path for path, _ in packed.model.named_parameters() if ".experts." in path}
    leaves = {path.rpartition(".experts.")[2] for path in held}
    if "desc_act" in name:
        assert leaves == {"gate_up_proj", "down_proj"}
    else:
        assert {"gate_up_proj_codes", "gate_up_proj_scale", "down_proj_codes", "down_proj_scale"} <= leaves
        assert not any("input_scale" in leaf for leaf in leaves)
        assert packed.weight_bytes < 0.6 * plain.weight_bytes
    for new, chunk in ((3, None), (1, 3)):
        got, wanted = packed.generate(PROMPT, new, chunk=chunk), plain.generate(PROMPT, new, chunk=chunk)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-4)


def test_drawn_experts_have_random_codes(tmp_path: Path) -> None:
    config = small_model("Qwen3MoeForCausalLM", **SIZES).config.to_dict()
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": CASES["awq"].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drawn = LoadedModel(tmp_path, registry=REGISTRY, dummy=True)
    assert len(drawn.model.get_submodule("layers.0.mlp.experts").gate_up_proj_codes.unique()) == 256
    assert bool(drawn.all_logits(PROMPT).isfinite().all())


def created(ranks: int, scheme: Scheme) -> MoE:
    build = Build(
        registry=REGISTRY,
        config=CONFIG,
        device=DeviceInfo("cpu"),
        torch_device=torch.device("cpu"),
        mesh=Mesh({"moe_tp": ranks}),
    )
    build.reduce = lambda group: None  # type: ignore[method-assign]  # no op of this version sums over ranks
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
        ConfigError, match=r"96 inputs of mlp.* 2 ranks of moe_tp in multiples of 32, .* largest --tp that works is 1"
    ):
        created(2, scheme)
