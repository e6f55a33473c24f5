"""A request's tokens and log-probabilities are the same to the bit alone, in a batch, in forks, in chunks, after a
preemption and with a prefix hit, for every layout that quantizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.engine.llm import LLM, Generated
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_quantization.kv.calibration import write_file
from llmcore_quantization.kv.layouts import TokenCodes
from llmcore_quantization.kv.names import FIXED, FORMS, LATENT, modes
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

ALONE = str(Path(__file__).with_name("alone.py"))
PROMPTS = [[5, 77, 200], list(range(30, 42)), [1], [260, 3, 3, 3, 9, 120, 44]]
SIZES: dict[str, Any] = {
    "vocab_size": 275,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 257,
    "bos_token_id": 256,
    "pad_token_id": 258,
}
NEW = 10


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=64)), tmp_path_factory)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    latent: dict[str, Any] = {
        "q_lora_rank": 16,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
    dense: dict[str, Any] = {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    }
    return saved(DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **latent, **dense)), tmp_path_factory)


def saved(model: Any, folders: pytest.TempPathFactory) -> Path:
    folder = folders.mktemp("model")
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def engine(folder: Path, mode: str, **settings: Any) -> LLM:
    settings = {"data_type": "fp32", "device": "cpu", "max_total_token_num": 400, **settings}
    return LLM(folder, [ALONE, "llama", "deepseek", "quantization"], mode=(mode,), deterministic=True, **settings)


def seen(answers: Sequence[Generated]) -> list[list[tuple[list[int], list[float], Any]]]:
    return [[(one.token_ids, one.logprobs, one.top_logprobs) for one in answer.answers] for answer in answers]


def check(folder: Path, mode: str, **more: Any) -> None:
    # Two answers are forks of one prompt.
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.9, "seed": 3, "n": 2, "logprobs": 3}
    with engine(folder, mode, **more) as llm:
        alone = [seen(llm.generate([prompt], **options))[0] for prompt in PROMPTS]
        assert alone[0][0] != alone[0][1]
        # The long prompt's KV is in the cache now.
        again = llm.generate(PROMPTS, **options)
        assert again[1].cached_tokens > 8
        assert seen(again) == alone
    for chunk, granule, tokens in ((4, 4, 60), (3, 1, 56)):
        # So few slots that requests are preempted.
        chunks = {"disable_dynamic_prompt_cache": True, "chunked_prefill_size": chunk, "batch_max_tokens": 32}
        tight = {"max_total_token_num": tokens, "length_estimator": "capped", "router_max_new_token_len": 1}
        with engine(folder, mode, cache_block_seq_len=granule, **chunks, **tight, **more) as llm:
            assert seen(llm.generate(PROMPTS, **options)) == alone
            assert llm.load().preemptions > 0


SAME = {"token-int4-g128"}
"""In heads of 64 elements it has the groups of another."""


@pytest.mark.parametrize("layout", sorted(set(FORMS) - SAME))
def test_heads(layout: str, llama: Path, tmp_path: Path) -> None:
    mode, more = mode_of(layout), {}
    if mode == FIXED:
        path = tmp_path / "scales.json"
        largest = torch.tensor([[[1.7, 0.9], [0.4, 2.2]], [[0.8, 3.1], [1.1, 0.6]]])
        write_file(path, "LlamaForCausalLM", "per_head", largest)
        more = {"kv_quant_calibration_config_path": str(path)}
    check(llama, mode, **more)


def test_latents(deepseek: Path) -> None:
    check(deepseek, mode_of(LATENT))


def test_a_layout_that_leaves_other_numbers_to_the_step_is_found(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Any = TokenCodes.write

    def forgetful(self: TokenCodes, kv: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        write(self, kv, slots, k.clone(), v.clone())

    monkeypatch.setattr(TokenCodes, "write", forgetful)
    with pytest.raises(AssertionError):
        check(llama, "int4kv")


def mode_of(layout: str) -> str:
    return next(mode.name for mode in modes() if layout in mode.layouts.values())
