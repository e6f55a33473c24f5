"""The openai client against a real server of a small random Llama: scores of prompts, and embeddings."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from llmcore_devtools.server import RunningServer, serving
from llmcore_devtools.tokenizer import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = [[5, 77, 200], list(range(30, 90))]
USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
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


@pytest.fixture(scope="module")
def server(model: tuple[Path, LlamaForCausalLM]) -> Iterator[RunningServer]:
    with serving(model[0], data_type="fp32", device="cpu", chunked_prefill_size=16) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_what_evaluations_ask_for(client: openai.OpenAI, model: tuple[Path, LlamaForCausalLM]) -> None:
    answer = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=PROMPTS,
        max_tokens=1,
        echo=True,
        logprobs=1,
        temperature=0,
        seed=1,
    )
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
        with torch.inference_mode():
            known = torch.log_softmax(model[1](torch.tensor([prompt])).logits[0], -1)
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
        assert len(logprobs.token_logprobs) == len(prompt) + 1
        expected = [float(known[i, token]) for i, token in enumerate(prompt[1:])]
        assert logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
        # whether the best token came is told by the best value
        best = [max(top.values()) for top in logprobs.top_logprobs[1:-1]]
        assert best == pytest.approx(known[:-1].max(-1).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings(client: openai.OpenAI, model: tuple[Path, LlamaForCausalLM], pooling: str) -> None:
    name = client.models.list().data[0].id
    # without a format the client asks for base64 and decodes it
    answer = client.embeddings.create(model=name, input=PROMPTS, extra_body={"pooling": pooling})
    floats = client.embeddings.create(
        model=name, input=PROMPTS, encoding_format="float", extra_body={"pooling": pooling}
    )
    for prompt, found, plain in zip(PROMPTS, answer.data, floats.data, strict=True):
        with torch.inference_mode():
            states = model[1].model(torch.tensor([prompt])).last_hidden_state[0]
        state = (states[-1] if pooling == "last" else states.mean(0)).numpy()
        np.testing.assert_allclose(found.embedding, state / np.linalg.norm(state), atol=1e-5)
        np.testing.assert_allclose(plain.embedding, found.embedding, atol=1e-5)
    short = client.embeddings.create(model=name, input="hello", dimensions=8, encoding_format="base64")
    raw: Any = short.data[0].embedding
    vector = np.frombuffer(base64.b64decode(raw), "<f4") if isinstance(raw, str) else np.array(raw)
    assert (vector.size, float(np.linalg.norm(vector))) == (8, pytest.approx(1, abs=1e-5))
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=name, input="x", dimensions=49)
    assert caught.value.param == "dimensions"


def test_the_best_answer(client: openai.OpenAI) -> None:
    name = client.models.list().data[0].id
    given: dict[str, Any] = {
        "model": name,
        "prompt": "ab",
        "max_tokens": 6,
        "seed": 3,
        "logprobs": 0,
        "temperature": 1,
    }
    every = client.completions.create(**given, n=5).choices

    def mean(choice: Any) -> float:
        return float(np.mean(choice.logprobs.token_logprobs))

    (best,) = client.completions.create(**given, best_of=5).choices
    assert best.text == max(every, key=mean).text


def test_a_chat_with_all_its_extras(client: openai.OpenAI) -> None:
    extras: dict[str, Any] = {
        **{"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True},
        **{"stop_token_ids": [1], "skip_special_tokens": False, "include_stop_str_in_output": True},
        **{"chat_template_kwargs": {"enable_thinking": False}, "priority": 0, "truncate_prompt_tokens": -1},
        **{"spaces_between_special_tokens": False, "allowed_token_ids": list(range(60, 90))},
        **{"typical_p": 0.95, "truncation_side": "left", "bad_words": ["a", "b c"], "verbosity": "low"},
    }
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[*USER, {"role": "assistant", "content": "Well"}],
        max_completion_tokens=8,
        n=2,
        seed=5,
        logprobs=True,
        top_logprobs=3,
        logit_bias={"70": 5},
        stop=["\n\n"],
        user="somebody",
        reasoning_effort="high",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        stream=True,
        stream_options={"include_usage": True},
        extra_body={
            **extras,
            "continue_final_message": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    )
    chunks = list(stream)
    assert all(chunk.usage is not None for chunk in chunks)
    assert {chunk.system_fingerprint for chunk in chunks} != {None}
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        entries = [entry for choice in mine if choice.logprobs for entry in choice.logprobs.content or ()]
        assert len(entries) == 8 and all(len(entry.top_logprobs) == 3 for entry in entries)
        assert all(entry.token != "a" for entry in entries)
