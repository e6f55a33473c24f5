from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools.dialect import Side
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_openai import logprobs
from llmcore_openai.routes import routes as openai_routes

PATH = "/v1/completions"


def test_a_whole_answer(openai: Callable[..., Side]) -> None:
    answer = openai("Hello<|im_end|>").ok(PATH, prompt="say")
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_stream(openai: Callable[..., Side]) -> None:
    *chunks, done = openai("ab").events(PATH, prompt="say", stream=True)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([64, 65], ["ab"]),
        ([[64, 65], [66]], ["ab", "c"]),
    ],
)
def test_four_kinds_of_prompt(
    openai: Callable[..., Side], tokenizer: FastTokenizer, prompt: Any, prompts: list[str]
) -> None:
    side = openai()
    answer = side.ok(PATH, prompt=prompt, max_tokens=3)
    sent = [memoryview(submit.prompt).cast("i").tolist() for submit in side.bridge.submitted]
    assert [tokenizer.decode(ids) for ids in sent] == prompts
    echoed = [(text * 3)[:3] for text in prompts]
    assert [choice["text"] for choice in answer["choices"]] == echoed
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_choices_are_in_the_order_of_prompts(openai: Callable[..., Side]) -> None:
    side = openai()
    body: dict[str, Any] = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1}
    answer = side.ok(PATH, **body)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    chunks = side.events(PATH, stream=True, **body)[:-1]
    texts = {(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks}
    assert texts == {(0, "a"), (1, "a"), (2, "b"), (3, "b"), *((i, "") for i in range(4))}


@pytest.mark.parametrize("prompt", ["the", [260]])
def test_echo(openai: Callable[..., Side], prompt: Any) -> None:
    side = openai("ab")
    assert side.ok(PATH, prompt=prompt, echo=True)["choices"][0]["text"] == "theab"
    chunks = side.events(PATH, prompt=prompt, echo=True, stream=True)[:-1]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["the", "a", "b", ""]


def test_logprobs(openai: Callable[..., Side]) -> None:
    logprobs = openai("ab 😀<|im_end|>").ok(PATH, prompt="x", logprobs=1)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b", " ", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80"],
        "token_logprobs": [-0.125, -0.25, -0.375, -0.5, -0.625],
        "top_logprobs": logprobs["top_logprobs"],
        "text_offset": [0, 1, 2, 3, 3],
    }
    assert logprobs["top_logprobs"][0] == {"`": -1.0, "a": -0.125}


def test_echo_with_logprobs(openai: Callable[..., Side]) -> None:
    body: dict[str, Any] = {"prompt": "xyz", "echo": True, "logprobs": 1, "n": 2}
    answer = openai("ab<|im_end|>").ok(PATH, **body)
    expected = {
        "tokens": ["x", "y", "z", "a", "b", "<|im_end|>"],
        "token_logprobs": [None, -0.5, -0.75, -0.125, -0.25, -0.375],
        "text_offset": [0, 1, 2, 3, 4, 5],
    }
    for choice in answer["choices"]:
        top = choice["logprobs"].pop("top_logprobs")
        assert choice["logprobs"] == expected
        assert top[:3] == [None, {"x": -1.0, "y": -0.5}, {"y": -1.0, "z": -0.75}]
    chunks = [chunk["choices"][0] for chunk in openai("ab<|im_end|>").events(PATH, **body, stream=True)[:-1]]
    for index in (0, 1):
        mine = [chunk["logprobs"] for chunk in chunks if chunk["index"] == index and chunk["logprobs"]]
        for name, column in expected.items():
            assert [value for logprobs in mine for value in logprobs[name]] == column


def test_a_prompt_of_one_token_has_its_entry(openai: Callable[..., Side]) -> None:
    logprobs = openai("a").ok(PATH, prompt=[[64], "x"], echo=True, logprobs=0)["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in logprobs] == [[None, -0.125]] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone(openai: Callable[..., Side], stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "xyz", "echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        options = {"include_usage": True}
        *chunks, last, _ = openai("ab").events(PATH, **body, stream=True, stream_options=options)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["xyz", ""]
        assert chunks[0]["choices"][0]["logprobs"]["tokens"] == ["x", "y", "z"]
        assert chunks[1]["choices"][0]["finish_reason"] == "length"
    else:
        last = openai("ab").ok(PATH, **body)
        (choice,) = last["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("xyz", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.75]
    assert last["usage"]["completion_tokens"] == 0


def test_the_best_of_several(openai: Callable[..., Side], tokenizer: FastTokenizer) -> None:
    # a token's log-probability falls with its place, so short answers are better ones
    side = openai()
    side.bridge.answer = lambda prompt, choice: [*tokenizer.encode("abcd"[choice:]), 257]
    answer = side.ok(PATH, prompt=["x", "y"], n=2, best_of=4, temperature=1)
    found = [(choice["index"], choice["text"], choice["logprobs"]) for choice in answer["choices"]]
    assert found == [(0, "d", None), (1, "cd", None), (2, "d", None), (3, "cd", None)]
    assert answer["usage"]["completion_tokens"] == 2 * (5 + 4 + 3 + 2)


def test_texts_and_ids_in_one_request(openai: Callable[..., Side]) -> None:
    answer = openai().ok(PATH, prompt=["ab", [66]], max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "cc"]


def test_token_ids(openai: Callable[..., Side]) -> None:
    side = openai("de<|im_end|>")
    body: dict[str, Any] = {"prompt": ["ab", [66]], "return_token_ids": True, "echo": True}
    whole = side.ok(PATH, **body)["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == [[64, 65], [66]]
    assert [choice["token_ids"][:2] for choice in whole] == [[67, 68]] * 2
    chunks = [chunk["choices"][0] for chunk in side.events(PATH, stream=True, **body)[:-1]]
    for index, choice in enumerate(whole):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert [token for chunk in mine for token in chunk["token_ids"]] == choice["token_ids"]
        prompts = [chunk["prompt_token_ids"] for chunk in mine if "prompt_token_ids" in chunk]
        assert prompts == [choice["prompt_token_ids"]]


def test_the_last_tokens_of_a_prompt(openai: Callable[..., Side]) -> None:
    for keep, text in ((2, "yzyz"), (-1, "xyzx")):
        answer = openai().ok(PATH, prompt="xyz", truncate_prompt_tokens=keep, max_tokens=4)
        assert answer["choices"][0]["text"] == text
    long = openai().ok(PATH, prompt="x" * 300, truncate_prompt_tokens=-1, max_tokens=4)
    assert long["usage"]["prompt_tokens"] == 200


def test_fill_in_the_middle(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    described = orjson.loads((directory / "tokenizer.json").read_bytes())
    for i, name in enumerate(("prefix", "suffix", "middle")):
        added = {"id": 275 + i, "content": f"<|fim_{name}|>", "special": False, "normalized": False}
        described["added_tokens"].append({**added, "single_word": False, "lstrip": False, "rstrip": False})
    (directory / "tokenizer.json").write_bytes(orjson.dumps(described))
    side = Side.of(openai_routes, load_tokenizer(directory), "ab")
    answer = side.ok(PATH, prompt="x", suffix="y", echo=True)
    assert memoryview(side.bridge.submitted[0].prompt).cast("i").tolist() == [275, 87, 276, 88, 277]
    assert answer["choices"][0]["text"] == "xab"


def test_only_some_tokens(openai: Callable[..., Side]) -> None:
    side = openai("ab")
    side.ok(PATH, prompt="x", allowed_token_ids=[64, 65])
    assert side.bridge.submitted[0].sampling.allowed_ids == (64, 65)


def test_the_fingerprint(openai: Callable[..., Side]) -> None:
    assert "system_fingerprint" not in openai("ab").ok(PATH, prompt="x")
    assert openai("ab", facts={"fingerprint": "abc"}).ok(PATH, prompt="x")["system_fingerprint"] == "fp_abc"


def test_one_prompt_too_long_refuses_all(openai: Callable[..., Side]) -> None:
    side = openai("ab", facts={"max_input_len": 5})
    result = side.post(PATH, prompt=["a", "b" * 6])
    assert (result.status_code, result.json["error"]["code"]) == (400, "context_length_exceeded")
    assert side.bridge.submitted == []
    side.ok(PATH, prompt=["a", "b" * 5])


def test_the_exact_border(openai: Callable[..., Side]) -> None:
    side = openai("a" * 20, facts={"max_input_len": 9, "max_total_len": 10})
    assert side.ok(PATH, prompt="b" * 9)["usage"]["completion_tokens"] == 1
    assert side.ok(PATH, prompt="b" * 6, max_tokens=4)["usage"]["completion_tokens"] == 4
    assert side.post(PATH, prompt="b" * 6, max_tokens=5).status_code == 400
    assert side.post(PATH, prompt="b" * 10).status_code == 400


def test_many_prompts_are_refused_at_once(openai: Callable[..., Side]) -> None:
    side = openai()
    assert side.post(PATH, prompt=["a"] * 100_000).json["error"]["param"] == "prompt"
    assert side.post(PATH, prompt=["a"] * 200, n=128).json["error"]["param"] == "prompt"


def test_prompt_logprobs(openai: Callable[..., Side]) -> None:
    """In each choice, as vLLM has them; an echo beside them shows no more than it was asked for."""
    side = openai("a")
    _, y, z = side.front.tokenizer.encode("xyz")
    answer = side.ok(PATH, prompt=["xyz", [7]], prompt_logprobs=1, n=2)
    first, twin, single, _ = answer["choices"]
    assert (
        first["prompt_logprobs"]
        == twin["prompt_logprobs"]
        == [
            None,
            {
                str(y): {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
                str(y - 1): {"logprob": -1.0, "rank": 1, "decoded_token": "x"},
            },
            {
                str(z): {"logprob": -0.75, "rank": 2, "decoded_token": "z"},
                str(z - 1): {"logprob": -1.0, "rank": 1, "decoded_token": "y"},
            },
        ]
    )
    assert single["prompt_logprobs"] == [None] and single["logprobs"] is None
    alone = side.ok(PATH, prompt="xyz", prompt_logprobs=0, echo=True, max_tokens=0)["choices"][0]
    assert [list(place) for place in alone["prompt_logprobs"][1:]] == [[str(y)], [str(z)]]
    both = side.ok(PATH, prompt="xyz", prompt_logprobs=3, echo=True, logprobs=1)["choices"][0]
    assert [len(place) for place in both["prompt_logprobs"][1:]] == [4, 4]
    assert [len(best or ()) for best in both["logprobs"]["top_logprobs"]] == [0, 2, 2, 2]
    assert "prompt_logprobs" not in side.ok(PATH, prompt="xyz")["choices"][0]


def test_prompts_of_which_too_much_is_asked(openai: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    side = openai("a", facts={"max_total_len": 200_000, "max_input_len": 200_000})
    for scale in (100, 1):  # what fits takes seconds to be told at its real size
        if scale == 1:
            monkeypatch.setattr(logprobs, "MOST_LOGPROBS_AT_ONCE", 1_310)
            monkeypatch.setattr(logprobs, "MOST_SHOWN", 4 * 1_310)
        short, long = [99] * 62 * scale, [99] * 63 * scale
        for more in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}):
            for body in ({"prompt": long}, {"prompt": [short] * 5}, {"prompt": short, "n": 5}):
                result = side.post(PATH, **body, **more)
                assert (result.status_code, result.json["error"]["param"]) == (400, list(more)[-1]), result.text
                assert ("131,072" if scale == 100 else "1,310") in result.json["error"]["message"]
            if scale == 1:
                side.ok(PATH, prompt=short, **more)
    side.ok(PATH, prompt=[99] * 1_000, prompt_logprobs=0)
