"""What a chat asks of the engine: its prompt, its limits, how its tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmcore.text.bad_words import NEVER, sequences_of
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools.dialect import Side
from llmcore_devtools.tokenizer import EOS, write_tokenizer
from llmcore_openai.routes import routes

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def test_how_a_request_becomes_a_submit(openai: Callable[..., Side]) -> None:
    side = openai(facts={"generation": {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}})
    side.ok(CHAT, messages=USER, max_tokens=3)
    first = side.bridge.submitted[0]
    assert (first.max_new_tokens, first.n, first.stop_ids) == (3, 1, (EOS,))
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 50)
    assert sampling.repetition_penalty == 1.1
    side.ok(
        CHAT,
        messages=USER,
        max_tokens=99,
        max_completion_tokens=4,
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=0.1,
        seed=5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": 3},
        ignore_eos=True,
        min_tokens=2,
        stop_token_ids=[9],
        cache_salt="mine",
    )
    second = side.bridge.submitted[1]
    assert (second.max_new_tokens, second.min_new_tokens, second.stop_ids) == (4, 2, (9,))
    assert second.salt and second.salt != b"mine"
    sampling = second.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.logit_bias, sampling.seed) == ({7: 3.0}, 5)


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"max_tokens": -1}, 50),
        ({"max_completion_tokens": -1}, 50),
        ({"max_completion_tokens": -1, "max_tokens": 7}, 7),
        ({"max_completion_tokens": 6, "max_tokens": -1}, 6),
    ],
)
def test_minus_one_token_is_as_many_as_fit(openai: Callable[..., Side], asked: dict[str, int], most: int) -> None:
    side = openai("ab", facts={"max_total_len": 100})
    side.ok(CHAT, messages=USER, **asked)
    submit = side.bridge.submitted[0]
    assert submit.max_new_tokens == (100 - len(submit.prompt) if most == 50 else most)
    if "max_tokens" in asked:
        side.ok("/v1/completions", prompt=list(range(50)), max_tokens=asked["max_tokens"])
        assert side.bridge.submitted[1].max_new_tokens == (50 if asked["max_tokens"] == -1 else 7)


def test_typical_p_and_top_p_0(openai: Callable[..., Side]) -> None:
    side = openai("ab", facts={"generation": {"typical_p": 0.9}})
    for asked in ({}, {"typical_p": 0.5}, {"typical_p": 1}, {"top_p": 0}):
        side.ok(CHAT, messages=USER, **asked)
    drawn = [submit.sampling for submit in side.bridge.submitted]
    assert [sampling.typical_p for sampling in drawn] == [0.9, 0.5, 1.0, 0.9]
    assert [sampling.greedy for sampling in drawn] == [False, False, False, True]


def test_bad_words_are_biases_and_a_processor(openai: Callable[..., Side], tokenizer: FastTokenizer) -> None:
    side = openai("ab")
    for path, prompt in ((CHAT, {"messages": USER}), ("/v1/completions", {"prompt": "hi"})):
        side.ok(path, bad_words=[], **prompt)
        side.ok(path, bad_words=["x", "house"], logit_bias={"7": 3}, **prompt)
        without, sampling = (submit.sampling for submit in side.bridge.submitted[-2:])
        assert not without.logit_bias and not without.logits_processors
        sequences = sequences_of(["x", "house"], tokenizer, side.front.facts.vocab_size)
        singles = {ids[0] for ids in sequences if len(ids) == 1}
        assert singles and sampling.logit_bias == {7: 3.0, **dict.fromkeys(singles, NEVER)}
        (processor,) = sampling.logits_processors
        assert (processor.name, processor.param) == ("bad_words", "bad_words")
        assert processor.args == {"sequences": [list(ids) for ids in sequences if len(ids) > 1]}
        small = openai("ab", facts={"vocab_size": 60})
        odd: list[tuple[Side, Any]] = [(side, words) for words in ([""], ["x" * 257], ["x"] * 1025, "x", [7])]
        for asked, words in (*odd, (small, ["house"])):
            refused = asked.post(path, bad_words=words, **prompt)
            assert refused.status_code == 400, words
            assert refused.json["error"]["param"].startswith("bad_words")


@pytest.mark.parametrize(
    ("own", "asked", "temperature"),
    [
        (0.6, {"do_sample": False}, 0.0),
        (0.6, {"do_sample": False, "temperature": 0.9}, 0.0),
        (0.6, {"do_sample": True}, 0.6),
        (0.0, {}, 0.0),
        (0.0, {"do_sample": True}, 1.0),
        (0.0, {"temperature": 0.4}, 0.4),
    ],
)
def test_whether_anything_is_drawn(
    openai: Callable[..., Side], own: float, asked: dict[str, Any], temperature: float
) -> None:
    side = openai(facts={"generation": {"temperature": own}})
    side.ok(CHAT, messages=USER, **asked)
    assert side.bridge.submitted[0].sampling.temperature == temperature


def test_the_least_tokens_under_either_name(openai: Callable[..., Side]) -> None:
    side = openai("abc")
    for asked in ({"min_tokens": 2}, {"min_new_tokens": 2}, {"min_tokens": 2, "min_new_tokens": 2}):
        side.ok(CHAT, messages=USER, max_tokens=3, **asked)
    assert [submit.min_new_tokens for submit in side.bridge.submitted] == [2, 2, 2]
    refused = side.post(CHAT, messages=USER, max_tokens=1, min_new_tokens=2)
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "min_new_tokens")
    refused = side.post(CHAT, messages=USER, min_tokens=1, min_new_tokens=2)
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "min_new_tokens")


def test_what_is_left_open(openai: Callable[..., Side]) -> None:
    side = openai("ab")
    side.ok(CHAT, messages=USER)
    side.ok(CHAT, messages=USER, temperature=None, seed=None, n=None, stop=None, stream=None, tools=None)
    first, second = side.bridge.submitted
    assert first.max_new_tokens == 256 - len(first.prompt)
    assert (first.sampling.temperature, first.sampling.logprobs) == (1.0, None)
    assert first.sampling.seed != second.sampling.seed


def test_content_parts_and_history(openai: Callable[..., Side], tokenizer: FastTokenizer) -> None:
    side = openai("ab")
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
        {"role": "assistant", "content": None, "refusal": "No."},
    ]
    side.ok(CHAT, messages=messages, add_generation_prompt=False)
    ids = side.bridge.submitted[0].prompt.ids.tolist()
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
    )
    refused = openai("ab").post(CHAT, messages=messages, allowed_token_ids=[])
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "allowed_token_ids")


def prompt_of(side: Side, tokenizer: FastTokenizer) -> str:
    (submit,) = side.bridge.submitted
    return tokenizer.decode(submit.prompt.ids.tolist(), skip_special_tokens=False)


def test_a_message_is_continued(openai: Callable[..., Side], tokenizer: FastTokenizer) -> None:
    side = openai("ab")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    side.ok(CHAT, messages=messages, continue_final_message=True)
    continued = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "
    assert prompt_of(side, tokenizer) == continued
    for mark in ("prefix", "partial"):
        prefixed = openai("ab")
        prefixed.ok(CHAT, messages=[messages[0], {**messages[1], mark: True}])
        assert prompt_of(prefixed, tokenizer) == continued
    plain = openai("ab")
    plain.ok(CHAT, messages=[messages[0], {**messages[1], "prefix": False}])
    assert prompt_of(plain, tokenizer) == continued + "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("mine", "more", "param"),
    [
        ({"partial": True, "prefix": False}, {}, "messages[1].prefix"),
        ({"partial": True}, {"continue_final_message": False}, "continue_final_message"),
        ({"partial": False}, {"continue_final_message": True}, "messages[1].partial"),
        ({"partial": True}, {"add_generation_prompt": True}, "messages[1].partial"),
        ({"partial": True, "role": "user"}, {}, "messages[1].partial"),
    ],
)
def test_wishes_that_contradict_each_other(
    openai: Callable[..., Side], mine: dict[str, Any], more: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, ", **mine}]
    result = openai("ab").post(CHAT, messages=messages, **more)
    assert (result.status_code, result.json["error"]["param"]) == (400, param)


def test_no_generation_prompt(openai: Callable[..., Side], tokenizer: FastTokenizer) -> None:
    side = openai("ab")
    side.ok(CHAT, messages=[{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert prompt_of(side, tokenizer).endswith("<|im_end|>\n")


def write_template(tmp_path: Path, text: str) -> FastTokenizer:
    directory = write_tokenizer(tmp_path)
    (directory / "chat_template.jinja").write_text(text)
    return load_tokenizer(directory)


@pytest.mark.parametrize(
    ("template", "effort", "prompt"),
    [
        ("{{ reasoning_effort }}", "xhigh", "xhigh"),
        ("x{% if enable_thinking %}think{% endif %}", "low", "xthink"),
        ("x{% if enable_thinking is not defined or enable_thinking %}think{% endif %}", "none", "x"),
        ("plain", "medium", "plain"),
        *(("plain", effort, "plain") for effort in ("none", "minimal", "low", "high", "xhigh", "max")),
    ],
)
def test_how_much_to_think(tmp_path: Path, template: str, effort: str, prompt: str) -> None:
    tokenizer = write_template(tmp_path, template)
    side = Side.of(routes, tokenizer, "ab")
    side.ok(CHAT, messages=[{"role": "user", "content": "hi"}], reasoning_effort=effort, verbosity="low")
    assert prompt_of(side, tokenizer) == prompt


def test_thinking_switched_by_name(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "hi"}]
    knows = write_template(tmp_path / "a", "x{% if enable_thinking is not defined or enable_thinking %}y{% endif %}")
    side = Side.of(routes, knows, "ab")
    side.ok(CHAT, messages=user, enable_thinking=False)
    assert prompt_of(side, knows) == "x"
    ignores = Side.of(routes, write_template(tmp_path / "b", "plain"), "ab")
    ignores.ok(CHAT, messages=user, enable_thinking=False)
    refused = ignores.post(CHAT, messages=user, enable_thinking=True)
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "enable_thinking")


def test_a_template_that_hides_the_message_to_continue(tmp_path: Path) -> None:
    side = Side.of(routes, write_template(tmp_path, "always this"), "ab")
    result = side.post(CHAT, messages=[{"role": "assistant", "content": "hi"}], continue_final_message=True)
    assert (result.status_code, result.json["error"]["param"]) == (400, "continue_final_message")
