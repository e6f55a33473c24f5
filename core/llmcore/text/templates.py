"""Chat templates: the Jinja text a model brings, rendered in a sandbox.

The environment is the one these templates are written for: `raise_exception`, `strftime_now`, `tojson` that leaves
non-ASCII text alone, loop controls, trimmed blocks, and a `generation` tag that only marks the assistant's turns.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
import orjson
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmcore.errors import ConfigError, RequestError

RESERVED = frozenset({"messages", "tools", "chat_template", "tokenize", "return_dict", "return_tensors"})
"""Variables a client may not set: they are set from its request, or mean something to other servers only."""

_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


MAX_CHARACTERS = 1 << 25
"""Most characters of a prompt; a body has no more, and few models read as many. A template may write a message again
for each message: what it has no end with must not take the worker's memory and time."""

MAX_VISITS = 10_000_000
"""How often messages are looked at while one prompt is rendered: a second's work."""

_TESTS_FOR_NULL = re.compile(r"""content(?:['"]\])?\s+is\s+(?:not\s+)?none""")
"""In a template's text: it knows messages without content."""


class TemplateRefusal(jinja2.TemplateError):
    """What a template itself raises about the messages, through `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; in serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The standard library's writer: templates depend on its ", " and ": ".
    import json

    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_from_generator,
    )


def _from_generator(value: Any) -> list[Any]:
    """What `tools | map(...)` gives."""
    if isinstance(value, GeneratorType):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


class ChatTemplate:
    """A model's named templates, compiled once.

    `sources`: Jinja text by name; "default" is used unless there is a "tool_use" one and tools are given.
    `tokens`: the special tokens' text by name (`bos_token`, ...), which templates may use as variables. `origin`:
    the option they come from, where they are not the model's. `variables`: all that the templates read.
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, Any], *, origin: str = ""):
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
            self._wants_null = {name for name, source in sources.items() if _TESTS_FOR_NULL.search(source)}
        except jinja2.TemplateError as error:
            what = origin or "the model's chat template"
            raise ConfigError(
                f"{what} cannot be compiled: {error}; correct {'it' if origin else 'chat_template.jinja'}"
            ) from error
        self._tokens = dict(tokens)
        self.variables = frozenset[str]().union(
            *(meta.find_undeclared_variables(environment.parse(source)) for source in sources.values())
        )

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt for `messages`. `tools` and every other variable go to the template.

        Raises RequestError with the template's own message when it refuses the messages.
        """
        name = self._choose(bool(variables.get("tools")))
        given = {"add_generation_prompt": True, **self._tokens, **variables}
        if not given.get("tools"):
            # Some templates iterate over `tools` whenever it is defined.
            given.pop("tools", None)
        failure: Exception | None = None
        for shape in _shapes(messages, name in self._wants_null):
            try:
                return self._rendered(name, shape, given)
            except TemplateRefusal as error:
                raise RequestError(str(error.message), param="messages", code="invalid_value") from error
            except _RENDER_ERRORS as error:
                failure = failure or error
        raise RequestError(
            f"the model's chat template cannot render these messages: {failure}",
            param="messages",
            code="invalid_value",
        ) from failure

    def _rendered(self, name: str, messages: Messages, given: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._templates[name].generate(messages=_Visited(messages, count()), **given):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise _too_long(f"a prompt of more than {MAX_CHARACTERS:,} characters")
            pieces.append(piece)
        return "".join(pieces)

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


def _too_long(why: str) -> RequestError:
    message = f"messages: the model's chat template makes {why} of them; send fewer or shorter ones"
    return RequestError(message, param="messages", code="context_length_exceeded")


class _Visited(list[Any]):
    """Messages, which count how often they are looked at, together with all parts of their list."""

    def __init__(self, messages: Iterable[Any], visits: count[int]):
        super().__init__(messages)
        self._visits = visits

    def __iter__(self) -> Iterator[Any]:
        for message in super().__iter__():
            if next(self._visits) >= MAX_VISITS:
                raise _too_long("too much work")
            yield message

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return _Visited(found, self._visits) if isinstance(key, slice) else found


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
