"""Log-probabilities of prompts are transformers', however prompts are cut, cached, forked and batched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.engine.llm import LLM
from llmcore_devtools.tokenizer import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = [[5, 77, 200], list(range(30, 130)), [1], [260, 3, 3, 3, 9, 120, 44]]
AHEAD = str(Path(__file__).with_name("ahead_device.py"))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = LlamaConfig(
        vocab_size=275, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, **sizes
    )
    model = LlamaForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory, model


def expected(model: LlamaForCausalLM, prompt: list[int]) -> list[float]:
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    return [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]


def ranks(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        order = model(torch.tensor([prompt])).logits[0].argsort(-1, descending=True)
    return [order[i].tolist().index(token) + 1 for i, token in enumerate(prompt[1:])]


@pytest.fixture(params=[(8, 0), (2048, 0), (8, 1)], ids=["chunks", "whole", "ahead"])
def llm(request: pytest.FixtureRequest, oracle: tuple[Path, LlamaForCausalLM]) -> Iterator[LLM]:
    chunk, ahead = request.param
    device = {"plugins": ["llama", AHEAD], "device": "cpu-ahead"} if ahead else {"device": "cpu"}
    settings = {
        "data_type": "fp32",
        "max_total_token_num": 600,
        "running_max_req_size": 16,
        "chunked_prefill_size": chunk,
    }
    with LLM(oracle[0], **settings, **device) as made:
        yield made


def test_they_are_transformers(llm: LLM, oracle: tuple[Path, LlamaForCausalLM]) -> None:
    plain = [answer.token_ids for answer in llm.generate(PROMPTS, **GREEDY)]
    for _ in range(2):
        # the second time everything is in the cache
        answers = llm.generate(PROMPTS, prompt_logprobs=True, **GREEDY)
        assert [answer.token_ids for answer in answers] == plain
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.cached_tokens == 0
            assert answer.prompt_logprobs == pytest.approx(expected(oracle[1], prompt), abs=1e-4)
            assert list(answer.prompt_ranks) == ranks(oracle[1], prompt)
    assert llm.generate([PROMPTS[1]], **GREEDY)[0].cached_tokens > 50


def test_they_come_once_for_all_choices_beside_others(llm: LLM, oracle: tuple[Path, LlamaForCausalLM]) -> None:
    prompt = PROMPTS[1]
    (answer,) = llm.generate([prompt], prompt_logprobs=True, n=3, temperature=1.0, logprobs=2, allowed_ids=(3, 4, 5))
    assert answer.prompt_logprobs == pytest.approx(expected(oracle[1], prompt), abs=1e-4)
    assert len(answer.answers) == 3
    assert llm.generate([prompt], **GREEDY)[0].prompt_logprobs == ()
