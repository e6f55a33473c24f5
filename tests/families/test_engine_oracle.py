"""The whole engine on small random checkpoints: greedy tokens are those of transformers in f32, however they are run.

Chunks, budgets, prefix hits, several turns, preemption, copies, a step in flight: none may change a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmcore.api.models import DATA_TYPES
from llmcore.engine.llm import LLM
from llmcore_devtools.family import small_model
from llmcore_devtools.tokenizer import write_tokenizer

pytestmark = pytest.mark.usefixtures("nothing_in_advance")

AHEAD = str(Path(__file__).parents[1] / "core" / "engine" / "ahead_device.py")
NEW = 9
LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
QWEN2_MOE = "Qwen2MoeForCausalLM"


def rope(kind: str, **numbers: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "dynamic": (
        LLAMA,
        {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 35, "head_dim": 6}
        | {"max_position_embeddings": 40, "vocab_size": 97}
        | rope("dynamic", factor=2.0),
    ),
    "yarn, biases, tied": (
        LLAMA,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "vocab_size": 301}
        | {"max_position_embeddings": 80}
        | rope("yarn", factor=4.0, original_max_position_embeddings=20, beta_fast=8, beta_slow=2),
    ),
    "llama3, ten heads on two": (
        LLAMA,
        {"num_attention_heads": 10, "num_key_value_heads": 2, "hidden_size": 50, "head_dim": 16}
        | {"max_position_embeddings": 80, "intermediate_size": 57}
        | rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24),
    ),
    "window": (MISTRAL, {"sliding_window": 7, "max_position_embeddings": 80} | rope("linear", factor=1.5)),
    "a window on some layers": (
        QWEN2,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "tie_word_embeddings": True}
        | {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56, "max_position_embeddings": 80}
        | rope("default"),
    ),
    "norms of q and k, a window between, dynamic": (
        QWEN3,
        {"use_sliding_window": True, "sliding_window": 11, "max_position_embeddings": 40, "head_dim": 12}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | rope("dynamic", factor=2.0),
    ),
    # in half types a token that is as near to a fourth expert as to a fifth may take the other: none is here
    "experts beside a shared one, and a dense layer": (
        QWEN2_MOE,
        {"num_experts": 10, "num_experts_per_tok": 4, "moe_intermediate_size": 15, "mlp_only_layers": [1]}
        | {"shared_expert_intermediate_size": 21, "max_position_embeddings": 80},
    ),
}

MODES: Mapping[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 3": {"chunked_prefill_size": 3, "batch_max_tokens": 16},
    "chunks of 1, nothing cached": {"chunked_prefill_size": 1, "disable_dynamic_prompt_cache": True},
    "prompts in one step": {"disable_chunked_prefill": True},
    "preempted": {"max_total_token_num": 81, "router_token_ratio": 1.0, "router_max_new_token_len": 1},
    "preempted, ahead": {"max_total_token_num": 81, "router_token_ratio": 1.0, "router_max_new_token_len": 1}
    | {"plugins": ["llama", "qwen", "contrib-models", AHEAD], "device": "cpu-ahead", "chunked_prefill_size": 7}
    | {"running_max_req_size": 16, "batch_max_tokens": 64},
}


@dataclass(frozen=True)
class Oracle:
    """A saved checkpoint, prompts, and what transformers answers; `unused` is an id that stands in no answer."""

    directory: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    unused: int

    def check(self, llm: LLM, n: int = 1) -> list[int]:
        """Answer all prompts at once; gives how much of each prompt came from the cache."""
        # an answer that could end early is one the scheduler may foresee as short, and preempt
        got = llm.generate(self.prompts, max_new_tokens=NEW, temperature=0.0, stop_token_ids=(self.unused,), n=n)
        for result, expected in zip(got, self.answers, strict=True):
            assert [answer.token_ids for answer in result.answers] == [expected] * n
        return [result.cached_tokens for result in got]


@torch.inference_mode()
def answer(model: Any, prompt: Sequence[int]) -> list[int]:
    """transformers' greedy tokens; the single token before makes a model with dynamic rope forget the last prompt."""
    model(torch.tensor([[1]]))
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    out: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return out


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    architecture, overrides = request.param
    model = small_model(architecture, 7, **overrides)
    draw = np.random.default_rng(7)
    prompts = [draw.integers(0, overrides.get("vocab_size", 131), n).tolist() for n in (1, 6, 17, 38, 39, 70)]
    # prefixes of one another, one on each side of dynamic rope's 40 tokens, and a prompt that is there twice
    prompts += [[*prompts[5][:30], 3, 4], prompts[5][:55], [*prompts[5][:50], 9], prompts[2]]
    answers = [answer(model, prompt) for prompt in prompts]
    prompts.append([*prompts[3], *answers[3], 5, 6])
    answers.append(answer(model, prompts[-1]))
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    write_tokenizer(directory)
    used = {token for tokens in answers for token in tokens}
    return Oracle(directory, prompts, answers, next(token for token in range(100) if token not in used))


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
def test_greedy_tokens(oracle: Oracle, mode: dict[str, Any]) -> None:
    settings = {"device": "cpu", "data_type": "fp32", "max_total_token_num": 2000, "max_req_total_len": 80, **mode}
    with LLM(oracle.directory, **settings) as llm:
        oracle.check(llm)
        cached = oracle.check(llm)
        load = llm.load()
    if "router_token_ratio" in mode:
        assert load.preemptions > 0
    elif "disable_dynamic_prompt_cache" in mode:
        assert not any(cached)
    else:
        assert cached[:6] == [len(prompt) - 1 for prompt in oracle.prompts[:6]]


def test_two_choices(oracle: Oracle) -> None:
    with LLM(
        oracle.directory, device="cpu", data_type="float32", max_total_token_num=170, max_req_total_len=80
    ) as llm:
        oracle.check(llm, n=2)


def test_old_place_of_rope(oracle: Oracle) -> None:
    """rope_theta beside the other fields, the rest as rope_scaling with its old `type`."""
    path = oracle.directory / "config.json"
    config = json.loads(path.read_text())
    new = {key: value for key, value in config.items() if key != "rope_parameters"}
    scaling = dict(config["rope_parameters"])
    new["rope_theta"], scaling["type"] = scaling.pop("rope_theta"), scaling.pop("rope_type")
    path.write_text(json.dumps(new | {"rope_scaling": scaling}))
    try:
        with LLM(oracle.directory, device="cpu", data_type="fp32", max_total_token_num=600) as llm:
            oracle.check(llm)
    finally:
        path.write_text(json.dumps(config))


@pytest.mark.parametrize("spelling", ["f32", "float16", "bf16"])
def test_data_types(oracle: Oracle, spelling: str) -> None:
    """Half types stay near f32."""
    prompt = oracle.prompts[2]
    options: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0, "logprobs": 97}
    best = []
    for data_type in ("fp32", spelling):
        with LLM(oracle.directory, device="cpu", data_type=data_type, max_total_token_num=200) as llm:
            pairs = dict(llm.generate([prompt], **options)[0].answers[0].top_logprobs[0])
            best.append(np.array([pairs.get(token, np.nan) for token in range(97)]))
    error = np.nanmax(np.abs(best[0] - best[1]))
    assert error < {"f32": 1e-6, "f16": 0.05, "bf16": 0.4}[DATA_TYPES[spelling]]
