"""huggingface_hub's client against a real server of a small random Llama."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, TextGenerationError, ValidationError
from llmcore.text.tokenizer import load_tokenizer
from llmcore_devtools.server import RunningServer, serving
from llmcore_devtools.sockets import call
from llmcore_devtools.tokenizer import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT = "abcdefgh"


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
    with serving(model[0], plugin_options={"use_tgi_api": True}, data_type="fp32", device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> InferenceClient:
    return InferenceClient(model=server.url, timeout=20)


def expected(model: LlamaForCausalLM, ids: list[int]) -> list[float]:
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    return [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]


def ids_of(answer: Any) -> list[int]:
    return [token.id for token in answer.details.tokens]


def test_what_langchain_sends(client: InferenceClient, model: tuple[Path, LlamaForCausalLM]) -> None:
    """Its defaults; and with the least share only the most typical token is left, as in transformers."""
    defaults: dict[str, Any] = {"return_full_text": False, "do_sample": False, "watermark": False, "truncate": None}
    asked = {**defaults, "max_new_tokens": 12, "temperature": 0.8, "details": True, "stop": []}
    answers = [client.text_generation(PROMPT, seed=3, top_p=0.95, typical_p=0.95, **asked) for _ in range(2)]
    assert ids_of(answers[0]) == ids_of(answers[1])
    ids = load_tokenizer(model[0]).encode(PROMPT)
    drawn = {"do_sample": True, "typical_p": 1e-6, "temperature": 0.8, "top_k": 0, "pad_token_id": 0}
    theirs = model[1].generate(torch.tensor([ids]), max_new_tokens=12, **drawn)[0, len(ids) :].tolist()
    mine = client.text_generation(PROMPT, typical_p=1e-6, **asked)
    greedy = client.text_generation(PROMPT, max_new_tokens=12, details=True)
    assert ids_of(mine) == theirs != ids_of(greedy)


def test_text(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=12)
    assert isinstance(text, str) and text
    assert "".join(client.text_generation(PROMPT, max_new_tokens=12, stream=True)).startswith(text[:3])
    assert client.text_generation(PROMPT, max_new_tokens=12, return_full_text=True) == PROMPT + text


def test_details(client: InferenceClient, model: tuple[Path, LlamaForCausalLM]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "details": True}
    whole = client.text_generation(PROMPT, decoder_input_details=True, top_n_tokens=3, **options)
    details = whole.details
    assert details is not None and details.top_tokens is not None
    ids = [token.id for token in details.prefill]
    assert "".join(token.text for token in details.prefill) == PROMPT
    assert [token.logprob for token in details.prefill[1:]] == pytest.approx(expected(model[1], ids), abs=1e-4)
    every = [*ids, *(token.id for token in details.tokens)]
    mine = [token.logprob for token in details.tokens]
    assert mine == pytest.approx(expected(model[1], every)[len(ids) - 1 :], abs=1e-4)
    # the client leaves lists in lists as they come
    best: list[Any] = details.top_tokens
    assert [tokens[0]["id"] for tokens in best] == [token.id for token in details.tokens]
    assert details.generated_tokens == len(details.tokens) and details.finish_reason in ("length", "eos_token")
    events = list(client.text_generation(PROMPT, stream=True, **options))
    assert [event.token.id for event in events] == [token.id for token in details.tokens]
    assert events[-1].generated_text == whole.generated_text
    assert events[-1].details is not None and events[-1].details.input_length == len(ids)
    assert [event.index for event in events] == list(range(1, len(events) + 1))


def test_sampling(client: InferenceClient) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "details": True}
    first, second = (client.text_generation(PROMPT, seed=7, **options) for _ in range(2))
    assert first.generated_text == second.generated_text
    assert first.details is not None and first.details.seed == 7
    several = client.text_generation(PROMPT, best_of=3, **options)
    assert several.details is not None and several.details.best_of_sequences is not None
    assert len(several.details.best_of_sequences) == 2
    means = [
        sum(token.logprob for token in one.tokens) / len(one.tokens)
        for one in (several.details, *several.details.best_of_sequences)
    ]
    assert means[0] == max(means)


def test_errors(client: InferenceClient) -> None:
    with pytest.raises(ValidationError, match=r"parameters\.watermark"):
        client.text_generation(PROMPT, watermark=True)
    with pytest.raises(TextGenerationError, match=r"context length"):
        client.text_generation(PROMPT, max_new_tokens=100_000)
    with pytest.raises(ValidationError, match="temperature"):
        list(client.text_generation(PROMPT, temperature=-1.0, stream=True))


def test_the_other_routes_stay(server: RunningServer) -> None:
    info = json.loads(call(server.port, "GET", "/info")[2])
    assert (info["max_total_tokens"], info["router"]) == (256, "llmcore")
    assert call(server.port, "GET", "/health")[0] == 200
    assert json.loads(call(server.port, "POST", "/tokens", {"text": PROMPT})[2])["ntokens"] > 0


def test_its_chats_are_served_under_whatever_name_it_sends(client: InferenceClient) -> None:
    hello: list[Any] = [{"role": "user", "content": "hello"}]
    whole = client.chat_completion(hello, max_tokens=4)
    assert whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(client.chat_completion(hello, model="tgi", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason
    with pytest.raises(HfHubHTTPError, match="404"):
        client.chat_completion(hello, model="another", max_tokens=4)


async def collected(url: str) -> str:
    async with AsyncInferenceClient(model=url) as client:
        return "".join([text async for text in await client.text_generation(PROMPT, max_new_tokens=5, stream=True)])


def test_the_asynchronous_client(server: RunningServer) -> None:
    assert asyncio.run(collected(server.url))
