"""Every family on two ranks: the logits and greedy tokens of one, its share of the weights, and its own KV heads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import packers
import pytest
import torch
from llmcore.api import ConfigError
from llmcore.layers.mesh import tensor_parallel
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from llmcore_quantization.kv.calibration import write_file
from packers import CASES
from safetensors.torch import load_file
from two_ranks import Broken, TwoRanks

REGISTRY = registry_for_tests()
PROMPTS = [[5, 9, 77, 3, 1, 30, 14, 2, 60], [100], [8, 8, 64]]
NEW = 3


def heads(heads: int, kv_heads: int, size: int = 8, **more: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * size}
    return {**sizes, "head_dim": size, "num_hidden_layers": 2, **more}


def latent(**more: Any) -> dict[str, Any]:
    return {"num_attention_heads": 4, "hidden_size": 32, "head_dim": 8, "num_hidden_layers": 2, **more}


REPEATED, CUT = heads(4, 1), heads(8, 4)
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama, tied, KV head repeated": ("LlamaForCausalLM", REPEATED | TIED),
    "llama, biases, whole blocks": (
        "LlamaForCausalLM",
        CUT | UNTIED | {"attention_bias": True, "mlp_bias": True, "vocab_size": 512},
    ),
    "llama, rank 1 has no token": ("LlamaForCausalLM", CUT | TIED | {"vocab_size": 101}),
    "llama, one score": ("LlamaForSequenceClassification", CUT | {"num_labels": 3}),
    "qwen2": ("Qwen2ForCausalLM", CUT | TIED),
    "qwen3": ("Qwen3ForCausalLM", REPEATED),
    "qwen2 moe": ("Qwen2MoeForCausalLM", CUT | EXPERTS | {"shared_expert_intermediate_size": 10}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", REPEATED | EXPERTS),
    "deepseek v2": ("DeepseekV2ForCausalLM", latent(q_lora_rank=None)),
    "deepseek v3": ("DeepseekV3ForCausalLM", latent(attention_bias=True)),
    "mistral": ("MistralForCausalLM", CUT | {"sliding_window": 5}),
    "mixtral": ("MixtralForCausalLM", CUT | {"num_local_experts": 3}),
    "phi3": ("Phi3ForCausalLM", CUT),
    "gemma2": ("Gemma2ForCausalLM", CUT | {"sliding_window": 4, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3ForCausalLM", REPEATED),
    "glm": ("GlmForCausalLM", CUT),
    "glm4": ("Glm4ForCausalLM", CUT | {"attention_bias": True}),
    "granite": ("GraniteForCausalLM", CUT | {"logits_scaling": 3.0}),
    "cohere": ("CohereForCausalLM", REPEATED | {"use_qk_norm": True}),
    "cohere2": ("Cohere2ForCausalLM", CUT),
    "smollm3": ("SmolLM3ForCausalLM", CUT),
    "starcoder2": ("Starcoder2ForCausalLM", CUT),
    "olmo2, KV head repeated": ("Olmo2ForCausalLM", REPEATED),
    "olmo2": ("Olmo2ForCausalLM", CUT),
    "stablelm": ("StableLmForCausalLM", CUT | {"qk_layernorm": True, "use_qkv_bias": True}),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    both = TwoRanks(tmp_path_factory.mktemp("ranks"))
    yield both
    both.kill()


def assert_ranks_do_the_same(ranks: TwoRanks, folder: Path, into: Path, **options: Any) -> list[dict[str, Any]]:
    """What the ranks answered, after a comparison with one rank."""
    one = LoadedModel(folder, registry=REGISTRY, granule=4, **options)
    wanted = [one.generate(prompt, NEW, chunk=5) for prompt in PROMPTS] + one.generate_mixed(PROMPTS, NEW, chunk=7)
    answers = ranks.ask("generate", path=str(folder), prompts=PROMPTS, new=NEW, into=str(into), **options)
    for rank, answer in enumerate(answers):
        assert answer["tokens"] == [run.tokens for run in wanted], f"rank {rank}"
        for index, logits in load_file(f"{into}.{rank}").items():
            expected = torch.stack(wanted[int(index)].logits)
            assert logits.shape == expected.shape
            worst = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1.0))
            assert worst < 1e-5, f"rank {rank}, run {index}: logits are off by {worst}"
    first, second = (load_file(f"{into}.{rank}") for rank in range(2))
    assert all(torch.equal(first[index], second[index]) for index in first), "the ranks have other bits"
    assert answers[0]["weights"] == answers[1]["weights"] < one.weight_bytes + table_padding(one)
    return answers


def table_padding(one: LoadedModel) -> int:
    """Bytes by which the padding of the vocabulary makes a small table larger."""
    table = one.model.embed_tokens.weight
    return (256 - len(table)) * table[0].nbytes if len(table) < 256 else 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_on_two_ranks(name: str, ranks: TwoRanks, tmp_path: Path) -> None:
    architecture, sizes = FAMILIES[name]
    small_model(architecture, **sizes).save_pretrained(tmp_path / "model")
    answers = assert_ranks_do_the_same(ranks, tmp_path / "model", tmp_path / "logits")
    held = {heads for answer in answers for heads in answer["kv_heads"].values()}
    assert held == {max(1, sizes.get("num_key_value_heads", 1) // 2)}


QUANTIZED = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
LLAMA, SPARSE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        *((LLAMA, case) for case in ("awq", "gptq", "gptq, 8 bits", "ct, 8 bits", "ct, int8, static", "fp8")),
        *((SPARSE, case) for case in ("awq", "fp8")),
    ],
)
def test_quantized_weights_on_two_ranks(architecture: str, case: str, ranks: TwoRanks, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    more = EXPERTS | {"moe_intermediate_size": 64, "num_hidden_layers": 1, "intermediate_size": 256}
    small_model(architecture, **QUANTIZED, **more).save_pretrained(folder)
    stored, _ = packers.packed_model(load_file(folder / "model.safetensors"), CASES[case], (), None)
    config = json.loads((folder / "config.json").read_text())
    packers.write(folder, {**config, "quantization_config": CASES[case].config}, stored)
    assert_ranks_do_the_same(ranks, folder, tmp_path / "logits")


@pytest.mark.parametrize(("sizes", "kind"), [(CUT, "per_head"), (CUT, "per_tensor"), (REPEATED, "per_head")])
def test_fixed_scales_of_kv_on_two_ranks(sizes: dict[str, Any], kind: Any, ranks: TwoRanks, tmp_path: Path) -> None:
    kv_heads = sizes["num_key_value_heads"]
    largest = torch.linspace(0.2, 2.0, 4 * kv_heads).view(2, 2, kv_heads)
    small_model(LLAMA, **sizes).save_pretrained(tmp_path / "model")
    write_file(tmp_path / "scales.json", LLAMA, kind, largest)
    options = {"kv_quant_calibration_config_path": str(tmp_path / "scales.json")}
    fixed: dict[str, Any] = {"modes": ["offline_calibration_fp8kv"], "options": options}
    assert_ranks_do_the_same(ranks, tmp_path / "model", tmp_path / "logits", **fixed)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (heads(6, 3), "6 attention heads and 3 KV heads cannot be cut over 2 ranks of attn_tp; --tp can be 1, 3, 6$"),
        (heads(9, 3), "9 attention heads and 3 KV heads cannot be cut over 2 ranks of attn_tp; --tp can be 1, 3, 9$"),
        (
            heads(4, 2, intermediate_size=27),
            "gate_proj of 27 cannot be cut over 2 ranks of attn_tp; --tp can be 1, 3, 9, 27$",
        ),
    ],
)
def test_a_cut_that_is_impossible_lists_what_works(sizes: dict[str, Any], said: str, tmp_path: Path) -> None:
    small_model("LlamaForCausalLM", **sizes).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said):
        LoadedModel(tmp_path, registry=REGISTRY, dummy=True, mesh=tensor_parallel(0, 2))


def test_each_rank_has_its_own_logits(ranks: TwoRanks, tmp_path: Path) -> None:
    """They are those that all ranks gather, without padding: the largest of both is the token."""
    small_model("CohereForCausalLM", **CUT, logit_scale=0.5).save_pretrained(tmp_path)
    answers = ranks.ask("own_logits", path=str(tmp_path), prompt=PROMPTS[0])
    assert [(answer["first"], answer["width"], answer["vocab"]) for answer in answers] == [
        (0, 128, 131),
        (128, 3, 131),
    ]
    assert all(answer["same"] for answer in answers)
    best = max(answers, key=lambda answer: answer["score"])
    assert best["best"] == answers[0]["token"] == answers[1]["token"]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_comm_ops_mean_the_same_on_both_ranks(dtype: str, ranks: TwoRanks) -> None:
    first, second = ranks.ask("comm", dtype=dtype, shapes=[[1, 1], [7, 40], [0, 4]])
    assert first["wrong"] == second["wrong"] == []
    assert len(first["digests"]) == 12
    same = [name for name in first["digests"] if first["digests"][name] == second["digests"][name]]
    assert len(same) == 12


@pytest.mark.parametrize("end", [False, True])
def test_a_rank_that_fails_does_not_leave_the_other_waiting(end: bool, ranks: TwoRanks) -> None:
    with pytest.raises(Broken, match="rank 1 ended with 3" if end else "this rank has had enough"):
        ranks.ask("fail", rank=1, end=end)
    assert ranks.ask("comm", dtype="f32", shapes=[[2, 2]])[0]["wrong"] == []


def test_a_rank_waits_no_longer_than_its_limit(ranks: TwoRanks) -> None:
    with pytest.raises(Broken, match=r"rank 0(.|\n)*Operation timed out"):
        ranks.ask("late", seconds=0.2)
    assert ranks.ask("comm", dtype="f32", shapes=[[2, 2]])[0]["wrong"] == []
