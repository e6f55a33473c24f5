"""Hidden states of prompts are transformers', however prompts are cut, cached, batched and sent back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmcore.api.bridge import Submit
from llmcore.api.errors import RequestError
from llmcore.engine.llm import LLM
from llmcore_devtools.tokenizer import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = [[5, 77, 200], list(range(30, 130)), [1], [260, 3, 3, 3, 9, 120, 44]]
AHEAD = str(Path(__file__).with_name("ahead_device.py"))


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


def expected(model: LlamaForCausalLM, prompt: list[int], pooling: str) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    return (states[-1] if pooling == "last" else states.mean(0)).numpy()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_they_are_transformers(llm: LLM, oracle: tuple[Path, LlamaForCausalLM], pooling: str) -> None:
    for _ in range(2):
        # the second time everything is in the cache
        found = llm.embed(PROMPTS, pooling=pooling, normalize=False)
        for prompt, state in zip(PROMPTS, found, strict=True):
            np.testing.assert_allclose(state, expected(oracle[1], prompt, pooling), atol=1e-4)
    (state,) = llm.embed([PROMPTS[1]], pooling=pooling)
    assert np.linalg.norm(state) == pytest.approx(1.0, abs=1e-5)
    # neither the answers of others nor the count of tokens shows that somebody wanted a state
    before = llm.load().output_tokens
    llm.embed(PROMPTS, pooling=pooling)
    assert llm.load().output_tokens == before


def test_a_last_state_takes_what_is_cached(llm: LLM) -> None:
    llm.generate([PROMPTS[1]], max_new_tokens=1)
    before = llm.load().cached_tokens
    llm.embed([PROMPTS[1]], pooling="mean")
    assert llm.load().cached_tokens == before
    llm.embed([PROMPTS[1]], pooling="last")
    assert llm.load().cached_tokens > before + 80


def test_the_best_tokens_of_a_prompt(llm: LLM, oracle: tuple[Path, LlamaForCausalLM]) -> None:
    (plain,) = llm.generate([PROMPTS[3]], prompt_logprobs=True, temperature=0.0, max_new_tokens=1)
    (answer,) = llm.generate([PROMPTS[3]], prompt_logprobs=True, prompt_top=3, temperature=0.0, max_new_tokens=1)
    assert (plain.prompt_top, answer.prompt_logprobs) == ((), pytest.approx(plain.prompt_logprobs, abs=1e-4))
    with torch.inference_mode():
        best = torch.log_softmax(oracle[1](torch.tensor([PROMPTS[3]])).logits[0], -1).topk(3, dim=-1)
    for place, row in enumerate(answer.prompt_top):
        assert [token for token, _ in row] == best.indices[place].tolist()
        assert [logprob for _, logprob in row] == pytest.approx(best.values[place].tolist(), abs=1e-4)


def test_what_a_state_cannot_come_with(llm: LLM) -> None:
    prompt = np.array([5, 6], "<i4").tobytes()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"pool": "cls"}, "pooling is one of last, mean"),
        ({"n": 2}, "nothing else"),
        ({"max_new_tokens": 2}, "nothing else"),
        ({"prompt_logprobs": True}, "nothing else"),
    ]
    for more, message in wrong:
        given = {"id": 1, "prompt": prompt, "max_new_tokens": 1, "pool": "last", **more}
        with pytest.raises(RequestError, match=message):
            llm._bridge._engine.submit(Submit(**given))
    with pytest.raises(RequestError, match="pooling is one of last, mean"):
        llm.embed(["x"], pooling="cls")
