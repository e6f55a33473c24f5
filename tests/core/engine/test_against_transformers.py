"""The whole engine on a small random Llama: greedy tokens are transformers', batched, chunked and with prefix hits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmcore.engine.llm import LLM
from llmcore_devtools.tokenizer import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = [[5, 77, 200], list(range(30, 90)), [1], [260, 3, 3, 3, 9, 120, 44]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=275,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=257,
        bos_token_id=256,
        pad_token_id=258,
    )
    model = LlamaForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory, model


@pytest.mark.parametrize("chunk", [8, 2048])
def test_greedy_tokens(oracle: tuple[Path, LlamaForCausalLM], chunk: int) -> None:
    directory, model = oracle
    expected = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=25, min_new_tokens=25, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    with LLM(directory, data_type="fp32", device="cpu", max_total_token_num=600, chunked_prefill_size=chunk) as llm:
        for _ in range(2):
            options = {"max_new_tokens": 25, "min_new_tokens": 25, "temperature": 0.0}
            answers = llm.generate(PROMPTS, **options)
            assert [answer.token_ids for answer in answers] == expected
        assert answers[1].cached_tokens > 50
