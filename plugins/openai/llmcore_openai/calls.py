"""Which tools a chat request may call or must call, and the grammar that sees to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmcore.api import LogitsProcessor, RequestError
from llmcore.api.text import CallGrammar, ParserContext, RequestParsing
from llmcore_server.api import Front, check, guided

from llmcore_openai.guide import guide, whitespace
from llmcore_openai.requests import ChatRequest, ToolChoice

Tools = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Choice:
    """What `tool_choice` says. `names`: the only tools that may be called, None for all that are offered. `named`: it
    is the name of a function.
    """

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None
    named: bool = False

    @property
    def free(self) -> bool:
        """Whether nothing has to be enforced."""
        return self.mode != "required" and self.names is None


def choice_of(body: ChatRequest) -> Choice:
    """Raises RequestError for what makes no sense with the request's tools."""
    given = body.tool_choice
    offered = {tool.function.name for tool in body.tools or ()}
    if given is None or given in ("none", "auto"):
        return Choice("none" if given == "none" else "auto")
    if not offered:
        raise _refusal("tool_choice", "it asks for a call, but there are no tools")
    if given == "required":
        return Choice("required")
    if isinstance(given, str):
        raise _refusal("tool_choice", f"{given[:50]!r} is none of none, auto, required")
    chosen = check(given, ToolChoice, at="tool_choice")
    if chosen.type == "function":
        if chosen.function is None:
            raise _refusal("tool_choice.function", "this field is required")
        name = _known([chosen.function.name], offered, "tool_choice.function.name")
        return Choice("required", name, named=True)
    if chosen.allowed_tools is None:
        raise _refusal("tool_choice.allowed_tools", "this field is required")
    names = [tool.function.name for tool in chosen.allowed_tools.tools]
    return Choice(chosen.allowed_tools.mode, _known(names, offered, "tool_choice.allowed_tools.tools"))


def chat_guide(
    front: Front, body: ChatRequest, tools: Sequence[Mapping[str, Any]], context: ParserContext
) -> LogitsProcessor | None:
    """What makes the answers fit: calls that the client forces, strict tools, a format of the answer, or none of it.

    `tools`: as the model sees them, [] where it sees none. `context`: what the answers' parsers know.
    """
    choice = choice_of(body)
    thought = _thought(front, context)
    functions: Tools = {tool["function"]["name"]: tool["function"] for tool in tools}
    for i, tool in enumerate(body.tools or ()):
        if tool.function.strict and tool.function.name in functions:
            functions = {**functions, tool.function.name: {**functions[tool.function.name], "strict": True}}
            strict = f"tools[{i}].function.strict"
    answer = guide(front, body, thought=thought)
    must_fit = any(function.get("strict") for function in functions.values())
    if not functions or (choice.free and not must_fit and answer is None):
        return answer
    param = "tool_choice" if not choice.free else strict if must_fit else "tools"
    context = replace(context, tools=_chosen(functions, choice))
    grammar = _call_grammar(front, context, param)
    single = body.parallel_tool_calls is False
    if answer is not None and choice.mode != "required":
        calls = grammar.forced(context.tools, single=single)
        return LogitsProcessor(answer.name, {**answer.args, "calls": calls}, answer.param)
    named = choice.mode == "required" and choice.names is not None and len(choice.names) == 1
    written = grammar.forced if choice.mode == "required" else grammar.free
    return guided(front, param, **written(context.tools, single=single or named), thought=thought, **whitespace(body))


def check_begun(guide: LogitsProcessor | None, parsing: RequestParsing | None) -> None:
    """Raises RequestError where `guide` would begin what the message that is to be continued has begun already."""
    begun = None if parsing is None else parsing.beginning
    if guide is not None and begun is not None and begun.within_markup:
        raise RequestError(
            f"{guide.param}: the last message ends within a tool call, or with what may begin one, and nothing can be "
            "enforced from there on; end the message before the call",
            param=guide.param,
            code="unsupported_parameter",
        )


def _chosen(functions: Tools, choice: Choice) -> Tools:
    return {name: tool for name, tool in functions.items() if choice.names is None or name in choice.names}


def _call_grammar(front: Front, context: ParserContext, param: str) -> CallGrammar:
    parser = front.parsers.tool
    grammar = None if parser is None else parser.grammar(context)
    if grammar is None:
        name = "none" if parser is None else parser.spec.name
        raise RequestError(
            f"{param}: it needs the grammar of the model's calls, which the parser {name!r} does not have; use "
            "tool_choice auto or none, without strict",
            param=param,
            code="unsupported_parameter",
        )
    return grammar


def _thought(front: Front, context: ParserContext) -> dict[str, Any] | None:
    """What may come before the answer."""
    parser = front.parsers.reasoning
    if parser is None or parser.spec.thought_tags is None:
        return None
    opening, closing = parser.spec.thought_tags
    inside = context.thinking(opening, closing)
    return None if inside is False else {"open": opening, "close": closing, "opened": bool(inside)}


def _known(names: Sequence[str], offered: set[str], param: str) -> frozenset[str]:
    for name in names:
        if name not in offered:
            raise _refusal(param, f"there is no tool {name[:100]!r}")
    return frozenset(names)


def _refusal(param: str, text: str) -> RequestError:
    return RequestError(f"{param}: {text}", param=param, code="invalid_value")
