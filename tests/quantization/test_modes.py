"""Modes that quantize: the seeds' names, what each pins, where it fits, and which go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from llmcore.api import ConfigError, ModeSpec
from llmcore.cli import root
from llmcore.engine.blueprint import blueprint_at
from llmcore.engine.llm import LLM
from llmcore.registry.devices import find_device
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import registry_for_tests
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_quantization import modes
from witness import MODES, rounded_model

REGISTRY = registry_for_tests()
SEEDS = json.loads((Path(__file__).parents[1] / "data" / "seed_options.json").read_text())["modes"]

WEIGHTS = {
    "triton_w4a16": "online_w4a16",
    "triton_int4weight": "online_w4a16",
    "lmdeploy_w4a16": "online_w4a16",
    "lmdeploy_int4weight": "online_w4a16",
    "ppl_w4a16": "online_w4a16_symmetric",
    "ppl_int4weight": "online_w4a16_symmetric",
    "triton_w8a16": "online_w8a16",
    "triton_int8weight": "online_w8a16",
    "triton_w8a8": "online_w8a8",
    "ppl_w8a8": "online_w8a8_plain_o",
    "ppl_w8a8_mixdown": "online_w8a8_mixdown",
}
"""LightLLM's modes for weights -> what quantizes."""

STORED = {
    "triton_int8kv": {"token": "token-int8"},
    "ppl_int8kv": {"token": "token-int8-g8"},
    "ppl_int8kv_flashdecoding": {"token": "token-int8-g8"},
    "ppl_int4kv_flashdecoding": {"token": "token-int4"},
    "triton_fp8kv": {"mla-latent": "mla-latent-fp8"},
}
"""LightLLM's modes for KV -> the layouts."""


def run(*args: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(root, [*args, "--json"])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_the_command_shows_every_name_of_the_seeds_and_what_it_pins() -> None:
    found = {row["name"]: row for row in run("modes", "--device", "cpu")}
    assert found.keys() >= {*SEEDS, *WEIGHTS, *STORED}
    assert {name: found[name]["quant"] for name in WEIGHTS} == WEIGHTS
    assert {name: found[name]["layouts"] for name in STORED} == STORED
    for group in modes.GROUPS:
        assert found[f"g{group}"]["quant_options"] == {"group": group}
    assert {name for name in SEEDS if "weight" in name or "_w" in name} <= set(WEIGHTS)


@pytest.mark.parametrize("deterministic", [False, True])
def test_on_a_gpu_every_mode_for_weights_fits(tmp_path: Path, deterministic: bool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = small_model("LlamaForCausalLM", **sizes, head_dim=64).config
    config.update({"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"})
    config.save_pretrained(tmp_path)
    where = blueprint_at(tmp_path, REGISTRY, find_device(REGISTRY, "sm90"), deterministic=deterministic)
    for mode in modes.modes():
        assert where.misfit(mode) is None


# --- modes that fit, and modes that do not ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "vocab_size": 275}
    return saved(
        small_model("LlamaForCausalLM", **sizes, num_key_value_heads=4, head_dim=16), tmp_path_factory.mktemp("llama")
    )


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return write_tokenizer(folder)


NOT_TOGETHER = [
    ("triton_w4a16 g65", "--mode g65: there is no such mode"),
    ("triton_w4a16 g32 g64", "--mode g32 pins quant option group to 32, --mode g64 to 64; give one of them"),
    ("g64", "--mode g64 chooses the group of a mode that quantizes weights.*give one beside it: lmdeploy_int4weight"),
    (
        "triton_w8a16 g64",
        "--mode triton_w8a16 and --mode g64 do not go together for .*online_w8a16 has no group to choose",
    ),
    ("triton_w8a16 triton_int8kv g64", "--mode triton_w8a16 and --mode g64 do not go together"),
    ("triton_w4a16 g64 triton_w8a8", "--mode triton_w4a16 pins quant to 'online_w4a16', --mode triton_w8a8 to"),
    ("triton_int8kv ppl_int8kv", "--mode triton_int8kv pins layout token to 'token-int8', --mode ppl_int8kv to"),
    ("triton_w4a16 g64 triton_fp8kv", "--mode triton_fp8kv does not fit.*is for KV of layout mla-latent"),
]


@pytest.mark.parametrize(("names", "message"), NOT_TOGETHER, ids=[names for names, _ in NOT_TOGETHER])
def test_modes_that_do_not_go_together_are_named(llama: Path, names: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(llama, device="cpu", mode=tuple(names.split()))


PINNED = """
from llmcore.api import ModeSpec, hookimpl

@hookimpl
def register_modes():
    yield ModeSpec(name="sdpa", kernels={"attn.gqa.decode": "sdpa"})
"""


def test_a_kernel_that_does_not_read_the_layout_is_named_with_it(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "pinned.py"
    file.write_text(PINNED)
    plugins = [str(file), "llama", "quantization"]
    message = "--mode triton_int8kv and --mode sdpa do not go together for .*needs layout token, has token-int8"
    with pytest.raises(ConfigError, match=message):
        LLM(llama, plugins, device="cpu", mode=("triton_int8kv", "triton_w8a16", "sdpa"))
    LLM(llama, plugins, device="cpu", mode=("triton_w8a16", "sdpa")).close()


def test_a_group_that_does_not_divide_names_those_that_do(llama: Path) -> None:
    wrong = "down_proj: groups of 128 inputs do not divide 192; "
    message = f"{wrong}groups of 64 or 32 do"
    for name, says in (("triton_w4a16", message), ("fp8w8a8_b128", f"{wrong}use a scale per row instead of groups")):
        with pytest.raises(ConfigError, match=f"--mode {name} does not fit LlamaForCausalLM on cpu.*{says}"):
            LLM(llama, device="cpu", mode=(name,))
    found = {row["name"]: row["misfit"] for row in run("modes", "--model", str(llama), "--device", "cpu")}
    assert message in found["triton_w4a16"] and message in found["g128"]
    assert all(found[name] is None for name in ("triton_w8a8", "g64", "triton_int8kv"))


# --- together ------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 275}
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
MIXTURE = {
    **HEADS,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 99,
    "num_key_value_heads": 4,
}
TOGETHER = {
    "heads": ("LlamaForCausalLM", HEADS, "triton_w4a16 g64", "triton_int8kv"),
    "windows": ("MistralForCausalLM", {**HEADS, "sliding_window": 6}, "ppl_w4a16 g32", "triton_int8kv"),
    "4 bits": ("Qwen2ForCausalLM", HEADS, "triton_w8a16", "ppl_int4kv_flashdecoding"),
    "experts": ("Qwen2MoeForCausalLM", MIXTURE, "triton_w4a16 g32", "triton_int8kv"),
    "latents": ("DeepseekV3ForCausalLM", LATENT, "triton_w4a16 g32", "triton_fp8kv"),
}
PROMPTS = [[5, 77, 200], list(range(30, 42)), [1], [260, 3, 3, 3, 9, 120, 44]]


@pytest.mark.parametrize("kind", TOGETHER)
def test_weights_and_kv_are_quantized_together(kind: str, tmp_path: Path) -> None:
    """A model whose weights the witness has rounded answers alike under the mode for KV alone."""
    architecture, more, weights, kv = TOGETHER[kind]
    theirs = small_model(architecture, **SIZES, **more)
    plain = saved(theirs, tmp_path / "plain")
    rounded = saved(rounded_model(theirs, MODES[weights], plain=("kv_b_proj", "expert_gate")), tmp_path / "rounded")
    expected = pytest.approx(answers(rounded, kv), abs=1e-4)
    assert answers(plain, f"{weights} {kv}") == expected
    for folder, names in ((rounded, ""), (plain, kv), (plain, weights)):
        assert answers(folder, names) != expected


def answers(folder: Path, names: str) -> list[float]:
    """The tokens of all answers and their log-probabilities."""
    with LLM(folder, mode=tuple(names.split()), data_type="fp32", device="cpu") as llm:
        found = llm.generate(PROMPTS, max_new_tokens=8, temperature=0.0, logprobs=1)
    return [number for answer in found for number in (*answer.token_ids, *answer.logprobs)]


HERE = Path(__file__).parent
MISTRAL = HERE.parents[1] / "contrib_models" / "mistral.py"
PLUGINS = [str(HERE / "kv" / "alone.py"), str(MISTRAL), "llama", "deepseek", "qwen"]
"""alone.py has kernels that compute every token alone, so `--deterministic` has a CPU to run on."""


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("heads", "triton_w4a16 g64 triton_int8kv"),
        ("heads", "triton_w8a16"),
        ("heads", "triton_w8a8"),
        ("heads", "fp8w8a8"),
        ("windows", "ppl_w4a16 g32 triton_int8kv"),
        ("experts", "triton_w4a16 g32"),
        ("latents", "triton_w4a16 g32 triton_fp8kv"),
    ],
)
def test_deterministic_answers_have_the_same_bits_in_every_batch(kind: str, names: str, tmp_path: Path) -> None:
    architecture, more, *_ = TOGETHER[kind]
    folder = saved(small_model(architecture, **SIZES, **more), tmp_path)
    settings: dict[str, Any] = {"mode": tuple(names.split()), "data_type": "fp32", "device": "cpu"}
    asked: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0, "logprobs": 1}
    plugins = [*PLUGINS, "quantization"]
    with LLM(folder, plugins, deterministic=True, **settings) as llm:
        alone = [bits(llm.generate([prompt], **asked)[0]) for prompt in PROMPTS]
        assert [bits(answer) for answer in llm.generate(PROMPTS, **asked)] == alone
    small = {"chunked_prefill_size": 4, "batch_max_tokens": 32}
    with LLM(folder, plugins, deterministic=True, **settings, **small) as llm:
        assert [bits(answer) for answer in llm.generate(PROMPTS, **asked)] == alone


def bits(answer: Any) -> tuple[list[int], bytes]:
    return answer.token_ids, torch.tensor(answer.logprobs, dtype=torch.float64).numpy().tobytes()


def test_modes_are_data() -> None:
    assert all(isinstance(mode, ModeSpec) and not (mode.kernels or mode.layouts) for mode in modes.modes())
