"""Tools of a chat request, and tool calls and reasoning in its answer."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import orjson
from llmcore.api import RequestError
from llmcore.api.text import Event, ReasoningDelta, TextDelta, ToolCallBegun, ToolCallDelta, joined
from llmcore_server.api import CallBlock, ReasoningBlock, TextBlock, blocks

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


def _described(tool: Tool) -> Mapping[str, Any]:
    function: dict[str, Any] = msgspec.to_builtins(tool.function)
    del function["strict"]  # no part of what models are shown
    return {"type": tool.type, "function": {name: value for name, value in function.items() if value is not None}}


def message_members(events: Sequence[Event]) -> dict[str, Any]:
    """The members of a whole message: content, and reasoning and tool_calls where there are any."""
    found = blocks(events)
    text = "".join(block.text for block in found if isinstance(block, TextBlock))
    reasoning = "".join(block.text for block in found if isinstance(block, ReasoningBlock))
    calls = [
        {"id": _call_id(), "type": "function", "function": {"name": block.name, "arguments": block.arguments}}
        for block in found
        if isinstance(block, CallBlock)
    ]
    members: dict[str, Any] = {"content": text or (None if calls else "")}
    if reasoning:
        members |= _reasoning(reasoning)
    if calls:
        members["tool_calls"] = calls
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
