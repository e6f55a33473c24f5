"""Tools of a chat request, and tool calls and reasoning in its answer."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import orjson
from llmcore.api import RequestError
from llmcore.api.text import Event, OutputParsers, ReasoningDelta, TextDelta, ToolCallBegun, ToolCallDelta, joined

from llmcore_openai.calls import choice_of
from llmcore_openai.requests import ChatRequest, Tool


def offered_tools(body: ChatRequest) -> list[Mapping[str, Any]]:
    """The tools that the model gets to see, as chat templates read them; none with `tool_choice` "none"."""
    if choice_of(body).mode == "none" or not body.tools:
        return []
    return [_described(tool) for tool in body.tools]


def refuse_functions(body: ChatRequest) -> None:
    """OpenAI's first form of tools, which its clients have left."""
    for name, instead, harmless in (
        ("functions", "tools", ([],)),
        ("function_call", "tool_choice", ("none", "auto")),
    ):
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise RequestError(
                f"{name}: it is deprecated and not supported; use {instead}", param=name, code="unsupported_parameter"
            )


def check_tools(parsers: OutputParsers, tools: Sequence[Mapping[str, Any]], prompt: str | None) -> None:
    """Raises RequestError where the model would not hear of its tools, or the server would not notice its calls.

    Some chat templates leave tools out silently. The error names all that is missing at once. `prompt`: None where the
    template refuses a request with tools.
    """
    if not tools:
        return
    shown = prompt is not None and any(tool["function"]["name"] in prompt for tool in tools)
    if not shown or parsers.tool is None:
        said = f"tools: {_what_is_missing(parsers, shown)}"
        raise RequestError(said, param="tools", code="unsupported_parameter")


def _what_is_missing(parsers: OutputParsers, shown: bool) -> str:
    unshown = "the model's chat template does not show them to the model"
    unread = "this server does not know how its model writes calls"
    known = f"one of {', '.join(parsers.tool_names)}" if parsers.tool_names else "pip install plugin-parsers has some"
    if shown:
        return f"{unread}; start it with --tool_call_parser ({known})"
    if parsers.tool is not None:
        name = parsers.tool.spec.name
        fix = f"--chat_template {name}" if name in parsers.template_names else "a --chat_template that does"
        return f"{unshown}; describe them in a message, or start the server with {fix}"
    if not parsers.template_names:
        return f"{unshown}, and {unread}; start it with a --chat_template that does and --tool_call_parser ({known})"
    return (
        f"{unshown}, and {unread}; start it with --chat_template NAME, which chooses the parser too. NAME is the "
        f"notation of calls that the model was trained on, one of {', '.join(parsers.template_names)}"
    )


def with_short_ids(message: Mapping[str, Any], size: int) -> dict[str, Any]:
    """`message` with calls' ids of `size` letters and digits, which some templates want; equal ones stay equal."""
    members = dict(message)
    if members.get("tool_call_id") is not None:
        members["tool_call_id"] = _short_id(members["tool_call_id"], size)
    if members.get("tool_calls"):
        members["tool_calls"] = [
            {**call, "id": _short_id(call.get("id") or str(i), size)} for i, call in enumerate(members["tool_calls"])
        ]
    return members


def _short_id(given: str, size: int) -> str:
    if len(given) == size and given.isascii() and given.isalnum():
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:size]


def _described(tool: Tool) -> Mapping[str, Any]:
    function: dict[str, Any] = msgspec.to_builtins(tool.function)
    del function["strict"]  # no part of what models are shown
    return {"type": tool.type, "function": {name: value for name, value in function.items() if value is not None}}


def message_members(events: Sequence[Event]) -> dict[str, Any]:
    """The members of a whole message: content, and reasoning and tool_calls where there are any."""
    text, reasoning = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for event in joined(events):
        match event:
            case TextDelta():
                text += event.text
            case ReasoningDelta():
                reasoning += event.text
            case ToolCallBegun():
                function = {"name": event.name, "arguments": ""}
                calls[event.index] = {"id": _call_id(), "type": "function", "function": function}
            case ToolCallDelta():
                calls[event.index]["function"]["arguments"] += event.arguments
    members: dict[str, Any] = {"content": text or (None if calls else "")}
    if reasoning:
        members |= _reasoning(reasoning)
    if calls:
        members["tool_calls"] = list(calls.values())
    return members


def deltas(events: Sequence[Event]) -> list[bytes]:
    """The members of one chunk per event that clients hear of."""
    return [b'"delta":%b' % orjson.dumps(delta) for delta in _deltas(events)]


def _deltas(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    for event in joined(events):
        match event:
            case TextDelta():
                yield {"content": event.text}
            case ReasoningDelta():
                yield _reasoning(event.text)
            case ToolCallBegun():
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.index, "id": _call_id(), "type": "function", "function": function}
                yield {"tool_calls": [call]}
            case ToolCallDelta():
                yield {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}


def _reasoning(text: str) -> dict[str, str]:
    # One name is DeepSeek's and LMDeploy's, the other that of newer servers; clients read either.
    return {"reasoning": text, "reasoning_content": text}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
