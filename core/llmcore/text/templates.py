"""Chat templates: the Jinja text a model brings, rendered in a sandbox and within a budget.

The environment is the one these templates are written for: `raise_exception`, `strftime_now`, `tojson` that leaves
non-ASCII text alone, loop controls, trimmed blocks, and a `generation` tag that only marks the assistant's turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from jinja2 import meta

from llmcore.errors import ConfigError, RequestError, message_of
from llmcore.text.render_budget import Budget, Busy, OverBudget, width_of
from llmcore.text.sandbox import Sandbox
from llmcore.text.sandbox_calls import GLOBALS, TemplateRefusal

RESERVED = frozenset(
    (
        *("messages", "tools", "chat_template", "tokenize", "return_dict", "return_tensors"),
        *("self", "super", "loop", "caller", "varargs", "kwargs", "true", "false", "none", "True", "False", "None"),
        *GLOBALS,
    )
)
"""Variables a client may not set: they are set from its request, mean something to other servers only, or are words
and functions of Jinja's."""

MAX_CHARACTERS = 1 << 25
"""Most characters of a prompt; a body has no more, and few models read as many."""

MAX_MESSAGE = 1000
"""Most characters of what a template says when it refuses."""

_PIECE_BYTES = 64
_LARGE = 1 << 20
"""Bytes of a prompt between two looks at how large it is."""

_TESTS_FOR_NULL = re.compile(r"""content(?:['"]\])?\s+is\s+(?:not\s+)?none""")
"""In a template's text: it knows messages without content."""


class ChatTemplate:
    """A model's named templates, compiled once.

    `sources`: Jinja text by name; "default" is used unless there is a "tool_use" one and tools are given.
    `tokens`: the special tokens' text by name (`bos_token`, ...), which templates may use as variables. `origin`:
    the option they come from, where they are not the model's. `variables`: all that the templates read.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        tokens: Mapping[str, Any],
        *,
        origin: str = "",
        constants: Mapping[str, Any] | None = None,
    ):
        what = origin or "the model's chat template"
        self._environment = Sandbox()
        try:
            self._templates = {name: self._environment.from_string(source) for name, source in sources.items()}
            read = [meta.find_undeclared_variables(self._environment.parse(source)) for source in sources.values()]
        except Exception as error:
            # Jinja's errors, and Python's about numbers, nesting and characters that it compiles no code from.
            raise ConfigError(
                f"{what} cannot be compiled: {message_of(error)[:MAX_MESSAGE]}; "
                f"correct {'it' if origin else 'chat_template.jinja'}"
            ) from error
        self._what = what
        self._wants_null = {name for name, source in sources.items() if _TESTS_FOR_NULL.search(source)}
        self._tokens = dict(tokens)
        self._constants = dict(constants or {})
        self.variables = frozenset[str]().union(*read) - self._constants.keys()

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """The prompt for `messages`. `tools` and every other variable go to the template.

        Raises RequestError with the template's own message when it refuses the messages, and one that names the
        template when it fails or needs more time or memory than it may have (`render_budget`).
        """
        name = self._choose(bool(variables.get("tools")))
        given = {"add_generation_prompt": True, **self._tokens, **variables, **self._constants}
        if not given.get("tools"):
            # Some templates iterate over `tools` whenever it is defined.
            given.pop("tools", None)
        budget = Budget()
        failure: Exception | None = None
        try:
            for shape in _shapes(messages, name in self._wants_null):
                try:
                    return self._rendered(name, {**given, "messages": shape}, budget)
                except (RequestError, OverBudget, Busy):
                    raise
                except TemplateRefusal as error:
                    said = str(error.message)[:MAX_MESSAGE]
                    raise RequestError(said, param="messages", code="invalid_value") from error
                except Exception as error:  # noqa: BLE001 - a template is foreign code
                    failure = failure or error
        except OverBudget as error:
            raise RequestError(
                f"{self._what} was stopped: for these messages it takes {error}; send fewer or shorter ones, and if "
                "that changes nothing, give the server another one with --chat_template",
                param="messages",
                code="invalid_value",
            ) from error
        except Busy as error:
            raise RequestError(
                f"{self._what} takes long for these messages, and for those of other requests at the same time; "
                "try again later",
                code="server_overloaded",
                status=503,
            ) from error
        finally:
            budget.close()
        raise RequestError(
            f"{self._what} cannot render these messages: {message_of(failure or ValueError())[:MAX_MESSAGE]}",
            param="messages",
            code="invalid_value",
        ) from failure

    def _rendered(self, name: str, variables: Mapping[str, Any], budget: Budget) -> str:
        pieces: list[str] = []
        size, width, seen, limit, kept = 0, 1, 0, _LARGE, 0
        for piece in self._environment.pieces(self._templates[name], variables, budget):
            size += len(piece) + _PIECE_BYTES
            pieces.append(piece)
            if size > limit:
                if size - _PIECE_BYTES * len(pieces) > MAX_CHARACTERS:
                    raise _too_long(self._what)
                # One wide character makes all of the joined prompt wide.
                width, seen = max(width, *map(width_of, pieces[seen:])), len(pieces)
                budget.keep(width * size - kept)
                budget.spend(size - limit + _LARGE)
                limit, kept = size + _LARGE, width * size
        prompt = "".join(pieces)
        if not prompt.isascii():
            prompt.encode()  # a template can write half of a character, which a tokenizer does not take
        return prompt

    def _choose(self, with_tools: bool) -> str:
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return name
        raise RequestError(
            "this model has no chat template; use /v1/completions or /generate with the whole prompt",
            param="messages",
            code="unsupported_parameter",
        )


def _too_long(what: str) -> RequestError:
    message = (
        f"messages: {what} makes a prompt of more than {MAX_CHARACTERS:,} characters of them; "
        "send fewer or shorter ones"
    )
    return RequestError(message, param="messages", code="context_length_exceeded")


Messages = list[Mapping[str, Any]]


def _shapes(messages: Sequence[Mapping[str, Any]], wants_null: bool) -> Iterator[Messages]:
    """`messages` as templates may want them, the likeliest shape first.

    OpenAI sends a call's arguments as JSON text, and most templates want the object. An assistant's absent content is
    an empty text for most; some ask whether it is none, and would begin an answer otherwise.
    """
    prepared = [prepare(message) for message in messages]
    filled = [_with_content(message) for message in prepared]
    if wants_null and prepared != filled:
        yield prepared
    yield filled
    if any(message.get("tool_calls") for message in messages):
        yield [_with_content(message) for message in messages]


def prepare(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """`message` with tool calls' arguments as objects."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_object_arguments(call) for call in calls]}


def _with_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("content") is None and message.get("role") in ("assistant", "function"):
        return {**message, "content": ""}
    return message


def _with_object_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        # A model's broken call in the history: the template shows it as it was.
        return call
    return {**call, "function": {**function, "arguments": arguments}}
