"""Guided decoding over a real socket, with the real engine and the openai client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import openai
import pytest
from llmcore_devtools import write_fake_model
from llmcore_devtools.server import RunningServer, serving
from pydantic import BaseModel, ConfigDict, Field

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


class Trip(BaseModel):
    """What the client wants; short, because the model draws at random."""

    model_config = ConfigDict(extra="forbid")

    place: Annotated[str, Field(max_length=4)]
    kind: Literal["train", "bus"]
    days: Annotated[int, Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_fake_model(tmp_path_factory.mktemp("models") / "fake")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with serving(
        model,
        plugins=["guided", "parsers"],
        max_total_token_num=40000,
        device="cpu",
        tool_call_parser="qwen25",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, text: str = "hello", **more: Any) -> Any:
    return client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}], **more)


def content(client: openai.OpenAI, **more: Any) -> str:
    text: str = ask(client, max_tokens=300, **more).choices[0].message.content
    return text


def tool(name: str, model: type[BaseModel], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": model.model_json_schema(), **more}}


TIGHT: dict[str, Any] = {"structured_outputs": {"json": Trip.model_json_schema(), "disable_any_whitespace": True}}


def test_the_clients_parse_helper(client: openai.OpenAI) -> None:
    for seed in range(5):
        answer = client.chat.completions.parse(
            model="fake",
            messages=[{"role": "user", "content": "a trip"}],
            response_format=Trip,
            seed=seed,
            temperature=0.5,
            max_tokens=3000,
            logit_bias={str(token): -100 for token in spaces(client)},
        )
        trip = answer.choices[0].message.parsed
        assert isinstance(trip, Trip) and answer.choices[0].finish_reason == "stop"


def spaces(client: openai.OpenAI) -> list[int]:
    """Ids of white space, which a model that draws at random writes without end between JSON's members."""
    return [220, 197, 198, 201]


def test_every_kind(client: openai.OpenAI) -> None:
    for seed in range(3):
        assert re.fullmatch("[a-c]{2}x", content(client, seed=seed, extra_body={"guided_regex": "[a-c]{2}x"}))
        assert content(client, seed=seed, extra_body={"guided_choice": ["yes", "no"]}) in ("yes", "no")
        grammar = {"guided_grammar": 'root ::= "<" [xy]+ ">"'}
        assert re.fullmatch("<[xy]+>", content(client, seed=seed, extra_body=grammar))
        Trip.model_validate_json(content(client, seed=seed, extra_body=TIGHT))
    done = client.completions.create(model="fake", prompt="x", max_tokens=50, n=3, extra_body={"regex": "ab|cd"})
    assert {choice.text for choice in done.choices} <= {"ab", "cd"}
    assert {choice.finish_reason for choice in done.choices} == {"stop"}


def test_streams(client: openai.OpenAI) -> None:
    parts = ask(client, stream=True, max_tokens=300, extra_body=TIGHT)
    Trip.model_validate_json("".join(part.choices[0].delta.content or "" for part in parts))


@pytest.mark.parametrize(
    "more", [{"ignore_eos": True}, {"min_tokens": 20}, {"ignore_eos": True, "min_tokens": 20}, {"temperature": 0}]
)
def test_a_complete_answer_ends_whatever_else_is_asked(client: openai.OpenAI, more: dict[str, Any]) -> None:
    temperature = more.pop("temperature", 1)
    for grammar in ({"regex": "abc"}, {"regex": "a?b"}, {"ebnf": "start: "}):
        answer = ask(client, max_tokens=40, temperature=temperature, extra_body={**grammar, **more}).choices[0]
        assert answer.finish_reason == "stop"
        assert answer.message.content in ("abc", "ab", "b", "")


def test_an_end_that_is_ignored_comes_no_earlier_than_it_must(client: openai.OpenAI) -> None:
    answer = content(client, extra_body={"regex": "[ab]{1,9}", "ignore_eos": True})
    assert len(answer) == 9


def test_forced_calls(client: openai.OpenAI) -> None:
    tools: Any = [tool("book", Trip), tool("look", Trip)]
    for choice, names, reason in (
        ("required", {"book", "look"}, "tool_calls"),
        ({"type": "function", "function": {"name": "look"}}, {"look"}, "stop"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "book"}}]},
            },
            {"book"},
            "tool_calls",
        ),
    ):
        answer = ask(
            client,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=3000,
            logit_bias={str(token): -100 for token in spaces(client)},
        ).choices[0]
        assert answer.finish_reason == reason and not answer.message.content
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        Trip.model_validate_json(call.function.arguments)


def test_neighbours_are_not_changed(client: openai.OpenAI) -> None:
    plain = [ask(client, f"plain {i}", temperature=0, max_tokens=40).choices[0].message.content for i in range(6)]
    alone = [content(client, seed=i, extra_body=TIGHT) for i in range(6)]

    def one(i: int) -> str:
        if i % 2:
            return content(client, seed=i // 2, extra_body=TIGHT)
        text: str = ask(client, f"plain {i // 2}", temperature=0, max_tokens=40).choices[0].message.content
        return text

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(one, range(12)))
    assert together[::2] == plain and together[1::2] == alone


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}},
            "response_format.json_schema.schema",
            "Unsatisfiable",
        ),
        ({"guided_grammar": "start: start"}, "guided_grammar", "nothing fits it"),
        ({"guided_choice": [""]}, "guided_choice", "list of texts"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look"),
        ({"logits_processors": [{"name": "guided", "args": {"regx": "a"}}]}, "logits_processors", "'regx'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_at_once(
    client: openai.OpenAI, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=body, stream=stream)
    assert time.monotonic() - began < 10.0  # a second is promised, and a busy machine has ten
    assert words in caught.value.message
    assert caught.value.param == param


def test_a_server_without_the_plugin_says_what_is_missing(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_fake_model(tmp_path_factory.mktemp("models") / "fake")
    with serving(model, plugins=["parsers"], max_total_token_num=1000, device="cpu") as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)
        with pytest.raises(openai.BadRequestError, match="pip install plugin-guided"):
            ask(client, response_format={"type": "json_object"})


def test_json_objects(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=200, response_format={"type": "json_object"}).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


UNIQUE = {
    "type": "object",
    "properties": {"ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}},
    "not": {"required": ["id"]},
}


def response_format(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE, **more}}


@pytest.mark.parametrize("more", [{}, {"strict": False}, {"strict": None}])
def test_keywords_that_are_not_enforced_are_named_in_a_header(client: openai.OpenAI, more: dict[str, Any]) -> None:
    """Before the first token, whole or streamed."""
    create = client.chat.completions.with_raw_response.create
    asked: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    for stream in (False, True):
        answer = create(**asked, response_format=response_format(**more), stream=stream)
        assert answer.headers["x-llmcore-unenforced"] == "not, uniqueItems"
    tools = [tool("look", Trip), tool("book", Trip)]
    tools[1]["function"]["parameters"] = UNIQUE
    answer = create(**asked, tools=tools, tool_choice="required", stream=True)
    assert answer.headers["x-llmcore-unenforced"] == "not, uniqueItems"
    completion = client.completions.with_raw_response.create
    answer = completion(model="fake", prompt=["x", "y"], max_tokens=3, stream=True, extra_body={"guided_json": UNIQUE})
    assert answer.headers["x-llmcore-unenforced"] == "not, uniqueItems"
    answer = create(**asked, response_format={"type": "json_object"})
    assert "x-llmcore-unenforced" not in answer.headers


def test_strict_is_an_error_where_it_cannot_be_kept(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not, uniqueItems: this cannot be enforced") as caught:
        ask(client, response_format=response_format(strict=True))
    assert caught.value.param == "response_format.json_schema.schema"
    strict = tool("book", Trip, strict=True)
    strict["function"]["parameters"] = UNIQUE
    with pytest.raises(openai.BadRequestError, match="the parameters of 'book': not, uniqueItems: this") as caught:
        ask(client, tools=[tool("look", Trip, strict=True), strict])
    assert caught.value.param == "tools[1].function.strict"


def test_arguments_of_calls_are_closed_too(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    look: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": schema}}
    for seed in range(4):
        answer = ask(client, seed=seed, tools=[look], tool_choice="required", parallel_tool_calls=False).choices[0]
        assert json.loads(answer.message.tool_calls[0].function.arguments) in ({"a": 1}, {"a": 2})
