"""Tools and reasoning in chat completions: what goes into the prompt, what comes out of the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import orjson
import pytest
from llmcore.api.specs import OutputParserSpec
from llmcore.api.text import Event, ParserContext, TextDelta
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools import registry_of
from llmcore_devtools.dialect import Side
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_openai.answers import ChatAnswer, ChatChunk
from llmcore_openai.routes import routes

from tests.dialects.test_answers import fits

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.reasoning_content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.tool_call_id }}{% endfor %}"
    "{% if thinking %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    directory = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def parsers() -> dict[str, OutputParserSpec]:
    return {spec.name: spec for spec, _ in registry_of("parsers").specs(OutputParserSpec)}


@pytest.fixture
def openai(tokenizer: FastTokenizer, parsers: dict[str, OutputParserSpec]) -> Callable[..., Side]:
    def side(answer: str | None = None, chosen: Iterable[str] = ("qwen25", "deepseek_r1"), **more: Any) -> Side:
        given = {"facts": {"max_input_len": 1000, "max_total_len": 2000}, **more}
        return Side.of(routes, tokenizer, answer, parsers=[parsers[name] for name in chosen], **given)

    return side


def prompt(side: Side) -> str:
    """What the engine was given last."""
    return side.front.tokenizer.decode(np.frombuffer(side.bridge.submitted[-1].prompt, "<i4").tolist())


def deltas(chunks: list[Any], index: int = 0) -> list[Any]:
    """The deltas of a choice after its opening."""
    mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
    assert mine[0]["delta"] == {"role": "assistant", "content": ""}
    return [choice["delta"] for choice in mine[1:]]


# --- answers -----------------------------------------------------------------------------------------------------


def test_a_whole_answer(openai: Callable[..., Side]) -> None:
    side = openai(f"<think>\nRome?\n</think>\n\nLet me see.\n{CALL}\n{CALL}<|im_end|>")
    [choice] = side.ok(CHAT, messages=USER, tools=[WEATHER])["choices"]
    calls = choice["message"].pop("tool_calls")
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning": "Rome?",
        "reasoning_content": "Rome?",
        "refusal": None,
    }
    assert choice["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in calls}) == 2
    assert all(call.pop("id").startswith("call_") for call in calls)
    assert calls == [{"type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}] * 2


def test_only_calls_have_no_content(openai: Callable[..., Side]) -> None:
    message = openai(f"{CALL}\n<|im_end|>").ok(CHAT, messages=USER, tools=[WEATHER])["choices"][0]["message"]
    assert message["content"] is None
    assert set(message) == {"role", "content", "refusal", "tool_calls"}


def test_an_answer_without_either(openai: Callable[..., Side]) -> None:
    [choice] = openai("Hello<|im_end|>").ok(CHAT, messages=USER, tools=[WEATHER])["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("group", [1, 4, 1000])
def test_a_stream(openai: Callable[..., Side], group: int) -> None:
    side = openai(f"<think>\nRome?\n</think>\n\nYes.\n{CALL}<|im_end|>", group=group)
    chunks = side.events(CHAT, messages=USER, tools=[WEATHER], stream=True)
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["tool_calls"]
    *parts, closing = deltas(chunks)
    assert closing == {}
    kinds = [next(iter(part)) for part in parts]
    assert list(dict.fromkeys(kinds)) == ["reasoning", "content", "tool_calls"]
    assert kinds == sorted(kinds, key=["reasoning", "content", "tool_calls"].index)
    assert "".join(part.get("reasoning_content", "") for part in parts) == "Rome?"
    assert all(part["reasoning"] == part["reasoning_content"] for part in parts if "reasoning" in part)
    assert "".join(part.get("content", "") for part in parts) == "Yes."
    [first], *others = [part["tool_calls"] for part in parts if "tool_calls" in part]
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for [call] in others)
    assert "".join(call["function"]["arguments"] for [call] in others) == '{"place": "Rome"}'
    assert len(others) > 5 or group > 1


def test_thoughts_and_calls_are_what_the_document_says_of_them(openai: Callable[..., Side]) -> None:
    side = openai(f"<think>\nRome?\n</think>\n\nYes.\n{CALL}<|im_end|>")
    body: dict[str, Any] = {"messages": USER, "tools": [WEATHER]}
    fits(ChatAnswer, side.ok(CHAT, **body))
    for chunk in side.events(CHAT, stream=True, **body)[:-1]:
        fits(ChatChunk, chunk)


def test_choices_do_not_mix(openai: Callable[..., Side], tokenizer: FastTokenizer) -> None:
    side = openai()
    texts = [f"{CALL}<|im_end|>", "Hello<|im_end|>", f"<think>a</think>{CALL}<|im_end|>"]
    side.bridge.answer = lambda prompt, choice: tokenizer.encode(texts[choice])
    choices = side.ok(CHAT, messages=USER, tools=[WEATHER], n=3)["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    assert [choice["message"].get("reasoning") for choice in choices] == [None, None, "a"]
    chunks = side.events(CHAT, messages=USER, tools=[WEATHER], n=3, stream=True)
    assert "".join(part.get("content", "") for part in deltas(chunks, 1)) == "Hello"
    assert deltas(chunks, 2)[-2]["tool_calls"][0]["index"] == 0


def test_a_limit_counts_more_than_a_call(openai: Callable[..., Side]) -> None:
    side = openai(f"{CALL}{CALL}<|im_end|>")
    [choice] = side.ok(CHAT, messages=USER, tools=[WEATHER], max_tokens=len(CALL) + 5)["choices"]
    assert choice["finish_reason"] == "length"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


def test_a_stop_string_ends_the_raw_text(openai: Callable[..., Side]) -> None:
    [choice] = openai(f"{CALL}<|im_end|>").ok(CHAT, messages=USER, tools=[WEATHER], stop="Rome")["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"place": "'
    assert choice["finish_reason"] == "tool_calls"
    [choice] = openai("ab <tool_call> cd").ok(CHAT, messages=USER, tools=[WEATHER], stop="_call>")["choices"]
    assert choice["message"]["content"] == "ab <tool"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("group", [1, 1000])
def test_no_parallel_calls_ends_after_the_first(openai: Callable[..., Side], stream: bool, group: int) -> None:
    side = openai(f"a {CALL} b {CALL}<|im_end|>", group=group)
    body = {"messages": USER, "tools": [WEATHER], "parallel_tool_calls": False}
    if stream:
        chunks = side.events(CHAT, stream=True, **body)
        text = "".join(part.get("content", "") for part in deltas(chunks))
        reason = chunks[-2]["choices"][0]["finish_reason"]
        begun = [call for part in deltas(chunks) for call in part.get("tool_calls", ()) if "id" in call]
    else:
        [choice] = side.ok(CHAT, **body)["choices"]
        text, reason, begun = choice["message"]["content"], choice["finish_reason"], choice["message"]["tool_calls"]
    assert (text, reason, len(begun)) == ("a", "tool_calls", 1)
    assert len(side.bridge.finished) == (group == 1)


def test_logprobs_cover_every_token(openai: Callable[..., Side], tokenizer: FastTokenizer) -> None:
    text = f"<think>a</think>b{CALL}"
    side = openai(f"{text}<|im_end|>")
    body = {"messages": USER, "tools": [WEATHER], "logprobs": True}
    content = side.ok(CHAT, **body)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == text
    chunks = side.events(CHAT, stream=True, **body)[:-1]
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert "".join(entry["token"] for one in shown if one for entry in one["content"]) == text


class Plain:
    """A parser for which everything is text."""

    def __init__(self, context: ParserContext):
        pass

    def feed(self, text: str) -> Iterable[Event]:
        return [TextDelta(text)]

    def finish(self) -> Iterable[Event]:
        return []


def test_a_parser_sees_its_special_tokens(openai: Callable[..., Side], tokenizer: FastTokenizer) -> None:
    starts = OutputParserSpec(name="s", kind="tool", make=f"{__name__}:Plain", special_tokens=("<|endoftext|>",))
    side = Side.of(routes, tokenizer, "a<|endoftext|>b<|im_start|>c<|im_end|>", parsers=[starts])
    assert side.ok(CHAT, messages=USER, tools=[WEATHER])["choices"][0]["message"]["content"] == "a<|endoftext|>bc"
    assert side.ok(CHAT, messages=USER)["choices"][0]["message"]["content"] == "abc"


# --- requests ----------------------------------------------------------------------------------------------------


def test_tools_and_their_results_reach_the_template(openai: Callable[..., Side]) -> None:
    side = openai("ok")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    side.ok(CHAT, messages=messages, tools=[WEATHER], tool_choice="auto")
    shown = {**call, "function": {"name": "weather", "arguments": {"place": "Rome"}}}
    listed, _, rest = prompt(side).partition("[user]")
    assert json.loads(listed) == [WEATHER]
    assert rest.startswith("hi[assistant]Hm.")
    calls, _, result = rest.removeprefix("hi[assistant]Hm.").partition("[tool]")
    assert orjson.loads(calls) == [shown | {"function": {"arguments": {"place": "Rome"}, "name": "weather"}}]
    assert result == "sunnycall_1"


def test_no_tools_for_a_model_that_may_not_call(openai: Callable[..., Side]) -> None:
    side = openai(CALL, chosen=())
    message = side.ok(CHAT, messages=USER, tools=[WEATHER], tool_choice="none")["choices"][0]["message"]
    assert message["content"] == CALL
    assert prompt(side) == "[user]hi"
    for harmless in ({"tools": []}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": False}):
        side.ok(CHAT, messages=USER, **harmless)


def test_the_prompt_says_whether_the_model_begins_inside_its_reasoning(openai: Callable[..., Side]) -> None:
    side = openai("Hm.</think>Yes.<|im_end|>")
    message = side.ok(CHAT, messages=USER, chat_template_kwargs={"thinking": True})["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    assert side.ok(CHAT, messages=USER)["choices"][0]["message"]["content"] == "Hm.</think>Yes."


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [
        ("<think>Well, h", "m.", "Yes."),
        ("<think>", "m.", "Yes."),
        ("<think>Well.</think>So ", None, "m.</think>Yes."),
        ("So ", None, "m.</think>Yes."),
    ],
)
def test_a_message_goes_on_where_it_was(
    openai: Callable[..., Side], begun: str, reasoning: str | None, content: str
) -> None:
    """What others wrote about tags does not matter."""
    side = openai("m.</think>Yes.<|im_end|>")
    messages = [{"role": "user", "content": "What is <think>?"}, {"role": "assistant", "content": begun}]
    message = side.ok(CHAT, messages=messages, continue_final_message=True)["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    assert prompt(side).endswith(f"[assistant]{begun}")


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "required", "tools": [WEATHER]}, "tool_choice", "pip install plugin-guided"),
        ({"tool_choice": named("weather"), "tools": [WEATHER]}, "tool_choice", "pip install plugin-guided"),
        ({"tool_choice": "sometimes", "tools": [WEATHER]}, "tool_choice", "'sometimes' is none of"),
        ({"tool_choice": 3, "tools": [WEATHER]}, "tool_choice", "expected str"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [named("")]}, "tools[0].function.name", "length"),
        ({"tools": {"a": 1}}, "tools", "expected array"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
            "pip install plugin-guided",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "deprecated and not supported; use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "deprecated and not supported; use tool_choice"),
    ],
)
def test_what_is_refused(openai: Callable[..., Side], body: dict[str, Any], param: str, message: str) -> None:
    result = openai("ok").post(CHAT, messages=USER, **body)
    assert result.status_code == 400, result.text
    assert message in result.json["error"]["message"]
    assert (result.json["error"]["param"] or "").replace("[]", "[0]").startswith(param.partition("[")[0])


def test_usage_counts_what_was_thought(openai: Callable[..., Side], tokenizer: FastTokenizer) -> None:
    thought = "<think>\nRome?\n</think>\n\n"
    expected = len(tokenizer.encode(thought))
    for group in (1, 3, 1000):
        side = openai(f"{thought}Yes.<|im_end|>", group=group)
        usage = side.ok(CHAT, messages=USER)["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}
        chunks = side.events(CHAT, messages=USER, stream=True, stream_options={"include_usage": True})
        assert chunks[-2]["usage"] == usage
        plain = openai("Yes, <think>.<|im_end|>", group=group).ok(CHAT, messages=USER)["usage"]
        assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert "completion_tokens_details" not in openai("Yes.", chosen=["qwen25"]).ok(CHAT, messages=USER)["usage"]


def test_tools_need_a_parser(openai: Callable[..., Side]) -> None:
    error = openai("ok", chosen=["deepseek_r1"]).post(CHAT, messages=USER, tools=[WEATHER]).json["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert "--tool_call_parser" in error["message"]


# --- answers that go on with a message ------------------------------------------------------------------------------


def refused(side: Side, **body: Any) -> Any:
    result = side.post(CHAT, **body)
    assert result.status_code == 400 and not side.bridge.submitted
    return result.json["error"]


def begun(content: str, **more: Any) -> list[Any]:
    return [*USER, {"role": "assistant", "content": content, "partial": True, **more}]


@pytest.mark.parametrize("cut", [3, 11, 20, 40, 57])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_begun_comes_whole(openai: Callable[..., Side], cut: int, stream: bool) -> None:
    side = openai(f"{CALL[cut:]}<|im_end|>")
    body = {"messages": begun(f"Let me see.\n{CALL[:cut]}"), "tools": [WEATHER], "stream": stream}
    if stream:
        chunks = side.events(CHAT, **body)
        [first], *others = [part["tool_calls"] for part in deltas(chunks)[:-1]]
        assert (first["index"], first["function"]["name"]) == (0, "weather") and first["id"]
        arguments = "".join(call["function"]["arguments"] for [call] in others)
    else:
        [choice] = side.ok(CHAT, **body)["choices"]
        [call] = choice["message"]["tool_calls"]
        assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
        assert call["function"]["name"] == "weather" and call["id"]
        arguments = call["function"]["arguments"]
    assert arguments == '{"place": "Rome"}'


def test_what_a_message_has_so_far_does_not_come_again(openai: Callable[..., Side]) -> None:
    side = openai(f" ok\n{CALL}<|im_end|>")
    message = side.ok(CHAT, messages=begun(f"<think>Rome?</think>A <tool_call> {CALL} is"), tools=[WEATHER])
    [choice] = message["choices"]
    assert choice["message"]["content"] == " ok" and "reasoning" not in choice["message"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


def test_a_begun_message_has_no_complete_calls(openai: Callable[..., Side]) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    error = refused(openai("<|im_end|>"), messages=begun("A", tool_calls=calls), tools=[WEATHER])
    assert error["param"] == "messages[1].partial" and "tool_calls" in error["message"]
