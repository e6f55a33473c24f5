"""Tools of a chat request, and tool calls and reasoning in its answer."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from llmcore.api import RequestError
from llmcore.api.http import Front
from llmcore.api.text import Event, ReasoningDelta, TextDelta, ToolCallBegun, ToolCallDelta, joined
from llmcore.builtin.openai.requests import ChatRequest, Tool


def offered_tools(front: Front, body: ChatRequest) -> list[Mapping[str, Any]]:
    """The tools that the model gets to see, as chat templates read them; none with `tool_choice` "none".

    Raises RequestError for what this server cannot promise.
    """
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if choice not in ("none", "auto"):
        if not body.tools:
            raise RequestError(
                "tool_choice: it asks for a call, but there are no tools", param="tool_choice", code="invalid_value"
            )
        if choice != "required" and not isinstance(choice, dict):
            raise RequestError(
                f"tool_choice: {choice[:50]!r} is none of none, auto, required",
                param="tool_choice",
                code="invalid_value",
            )
        raise RequestError(
            "tool_choice: forcing a call needs a grammar, which this version does not have; use auto or none",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if choice == "none" or not body.tools:
        return []
    if front.parsers.tool is None:
        raise RequestError(
            "tools: this server does not know how its model writes calls; start it with --tool_call_parser",
            param="tools",
            code="unsupported_parameter",
        )
    return [_described(tool, f"tools[{i}].function") for i, tool in enumerate(body.tools)]


def _described(tool: Tool, path: str) -> Mapping[str, Any]:
    function: dict[str, Any] = msgspec.to_builtins(tool.function)
    if function.pop("strict"):
        raise RequestError(
            f"{path}.strict: it needs a grammar, which this version does not have; leave it out",
            param=f"{path}.strict",
            code="unsupported_parameter",
        )
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
