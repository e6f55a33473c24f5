"""Chat templates: a model's Jinja texts, rendered in a sandbox and within a budget.

The environment has what chat templates expect: `raise_exception`, `strftime_now`, `tojson` that keeps non-ASCII text,
loop controls, trimmed blocks, and a `generation` tag that only marks the assistant's turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from jinja2 import meta

from llmcore.api.errors import ConfigError, RequestError, message_of
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
"""Variables that a client must not set: the server sets them from the request, only other servers know them, or they
are keywords and functions of Jinja."""

MAX_CHARACTERS = 1 << 25
"""Most characters of a prompt. A request's body cannot have more, and few models can read that many."""

MAX_MESSAGE = 1000
"""Most characters of a template's own error message."""

_PIECE_BYTES = 64
_LARGE = 1 << 20
"""Bytes of a prompt between two checks of its size."""

_TESTS_FOR_NULL = re.compile(r"""content(?:['"]\])?\s+is\s+(?:not\s+)?none""")
"""Matches a template's text if it handles messages without content."""


class ChatTemplate:
    """A model's named templates, compiled once.

    `sources`: Jinja text by name. "default" is used, or "tool_use" if it exists and the request has tools.
    `tokens`: the text of special tokens by name (`bos_token`, ...), which templates may use as variables.
    `origin`: the option that gave the templates, if they are not the model's.
    `variables`: the variables that the templates read.
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
            # Jinja's errors, and Python's errors for numbers, nesting and characters that it cannot compile.
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
        """Render the chat template: the prompt for `messages`. It gets `tools` and all other variables.

        Raises RequestError: with the template's own message if it refuses the messages, or with the template's name if
        it fails or exceeds its limits of time and memory (`render_budget`).
        """
        name = self._choose(bool(variables.get("tools")))
        given = {"add_generation_prompt": True, **self._tokens, **variables, **self._constants}
        if not given.get("tools"):
            # Some templates iterate over `tools` if it is defined, even if it is None.
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
                # One wide character makes every character of the joined prompt wide.
                width, seen = max(width, *map(width_of, pieces[seen:])), len(pieces)
                budget.keep(width * size - kept)
                budget.spend(size - limit + _LARGE)
                limit, kept = size + _LARGE, width * size
        prompt = "".join(pieces)
        if not prompt.isascii():
            prompt.encode()  # A template can write half a character (a surrogate), which tokenizers refuse.
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
    """`messages` in the shapes that templates may expect, the likeliest first.

    OpenAI sends a call's arguments as JSON text, but most templates expect an object. For an assistant message without
    content, most templates expect an empty text. Some test it for none, and with an empty text they would begin an
    answer.
    """
    prepared = [prepare(message) for message in messages]
    filled = [_with_content(message) for message in prepared]
    if wants_null and prepared != filled:
        yield prepared
    yield filled
    if any(message.get("tool_calls") for message in messages):
        yield [_with_content(message) for message in messages]


def prepare(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """`message` with the arguments of tool calls as objects."""
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
        # The history may contain a model's broken call. The template shows it unchanged.
        return call
    return {**call, "function": {**function, "arguments": arguments}}
