"""Which tools a chat request may call or must call, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmcore.api import LogitsProcessor, RequestError
from llmcore.api.text import ParserContext
from llmcore_server.api import Front, ToolChoice, check, guided_calls, thought_of

from llmcore_openai import requests
from llmcore_openai.guide import guide, whitespace
from llmcore_openai.requests import ChatRequest


def choice_of(body: ChatRequest) -> ToolChoice:
    """Raises RequestError for what makes no sense with the request's tools."""
    given = body.tool_choice
    offered = {tool.function.name for tool in body.tools or ()}
    if given is None or given in ("none", "auto"):
        return ToolChoice("none" if given == "none" else "auto")
    if not offered:
        raise _refusal("tool_choice", "it asks for a call, but there are no tools")
    if given == "required":
        return ToolChoice("required")
    if isinstance(given, str):
        raise _refusal("tool_choice", f"{given[:50]!r} is none of none, auto, required")
    chosen = check(given, requests.ToolChoice, at="tool_choice")
    if chosen.type == "function":
        if chosen.function is None:
            raise _refusal("tool_choice.function", "this field is required")
        name = _known([chosen.function.name], offered, "tool_choice.function.name")
        return ToolChoice("required", name, named=True)
    if chosen.allowed_tools is None:
        raise _refusal("tool_choice.allowed_tools", "this field is required")
    names = [tool.function.name for tool in chosen.allowed_tools.tools]
    return ToolChoice(chosen.allowed_tools.mode, _known(names, offered, "tool_choice.allowed_tools.tools"))


def chat_guide(front: Front, body: ChatRequest, choice: ToolChoice, context: ParserContext) -> LogitsProcessor | None:
    """What makes the answers fit: calls that the client forces, strict tools, a format of the answer, or none of it.

    `context`: what the answers' parsers know.
    """
    functions = dict(context.tools)
    strict = ""
    for i, tool in enumerate(body.tools or ()):
        name = tool.function.name
        if tool.function.strict and name in functions:
            functions[name] = {**functions[name], "strict": True}
            strict = f"tools[{i}].function.strict"
    answer = guide(front, body, thought=thought_of(front, context))
    single = body.parallel_tool_calls is False
    context = replace(context, tools=functions)
    return guided_calls(front, choice, context, answer, strict=strict, single=single, **whitespace(body))


def _known(names: Sequence[str], offered: set[str], param: str) -> frozenset[str]:
    for name in names:
        if name not in offered:
            raise _refusal(param, f"there is no tool {name[:100]!r}")
    return frozenset(names)


def _refusal(param: str, text: str) -> RequestError:
    return RequestError(f"{param}: {text}", param=param, code="invalid_value")
