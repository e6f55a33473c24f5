"""Tools of a conversation: whether the model hears of them, which it may call, and the grammar that sees to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmcore.api.bridge import LogitsProcessor
from llmcore.api.errors import RequestError
from llmcore.text.call_grammar import CallGrammar
from llmcore.text.parsing import OutputParsers, ParserContext, RequestParsing

from llmcore_server.http.front import Front
from llmcore_server.http.guided import guided


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer may call, or must call.

    `names`: the only ones, None for all that are offered. `named`: the client names the function to call.
    """

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None
    named: bool = False

    @property
    def free(self) -> bool:
        """Whether nothing has to be enforced."""
        return self.mode != "required" and self.names is None


def guided_calls(
    front: Front,
    choice: ToolChoice,
    context: ParserContext,
    answer: LogitsProcessor | None,
    *,
    strict: str = "",
    single: bool = False,
    **options: Any,
) -> LogitsProcessor | None:
    """What makes the answers fit: calls that `choice` forces, tools that are strict, `answer`, or none of it.

    `context`: what the answers' parsers know. The calls of those of its `tools` that have a true member `strict` fit
    the parameters of the tool; `strict` is the client's field that asks for it. `answer`: what makes a text fit that
    is not a call. `single`: an answer has one call at most. `options`: further arguments of `guided`, where it is
    asked for calls. Raises RequestError where the model's parser has no grammar of calls.
    """
    functions = context.tools
    must_fit = any(function.get("strict") for function in functions.values())
    if not functions or (choice.free and not must_fit and answer is None):
        return answer
    param = "tool_choice" if not choice.free else strict if must_fit else "tools"
    tools = {name: tool for name, tool in functions.items() if choice.names is None or name in choice.names}
    context = replace(context, tools=tools)
    grammar = _call_grammar(front, context, param)
    if answer is not None and choice.mode != "required":
        calls = grammar.forced(tools, single=single)
        return LogitsProcessor(answer.name, {**answer.args, "calls": calls}, answer.param)
    named = choice.mode == "required" and choice.names is not None and len(choice.names) == 1
    written = grammar.forced if choice.mode == "required" else grammar.free
    return guided(
        front, param, **written(tools, single=single or named), thought=thought_of(front, context), **options
    )


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


def thought_of(front: Front, context: ParserContext) -> dict[str, Any] | None:
    """What may come before the answer, as `guided` reads it; None where nothing may."""
    parser = front.parsers.reasoning
    if parser is None or parser.spec.thought_tags is None:
        return None
    opening, closing = parser.spec.thought_tags
    inside = context.thinking(opening, closing)
    return None if inside is False else {"open": opening, "close": closing, "opened": bool(inside)}
