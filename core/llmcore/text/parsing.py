"""Output parsers: which ones a server has, and how they work on one choice's text.

A reasoning parser reads first; the text it leaves goes through the tool parser. Both are made per choice, so that
they can keep state, and never see another request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from llmcore.config import Model
from llmcore.plugins import load
from llmcore.protocols import Tokenizer
from llmcore.specs import OutputParserSpec
from llmcore.text.call_grammar import CallGrammar
from llmcore.text.chosen_template import named_templates
from llmcore.text.events import Event, TextDelta
from llmcore.text.parser_choice import check_parsers
from llmcore.text.resumed import Beginning, Resumed, begin


@dataclass(frozen=True, kw_only=True)
class ParserContext:
    """The request whose answers a parser is made for.

    `tools`: the functions that the model may call, by name, each as the client described it (`description`,
    `parameters`: a JSON schema, ...); a call to any other name is text. `tool_choice`: OpenAI's word for how free the
    model is, "auto" unless the client said something else. `template_variables`: the request's
    `chat_template_kwargs`. `prompt`: the rendered conversation, whose end says where the model goes on. `continued`:
    what its last message has so far, where the model goes on with that; it ends the prompt. Parsers are made as if it
    were a part of the answer, and read it first: to them it is "" and no part of the prompt. `call_tags`: what calls
    begin with (`OutputParserSpec.call_tags` of the request's tool parser), for a reasoning parser.
    """

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tool_choice: str = "auto"
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    continued: str = ""
    call_tags: tuple[str, ...] = ()

    def thinking(self, opening: str, closing: str) -> bool | None:
        """Whether the model goes on inside thoughts between these tags (True) or after them (False); None: what it
        writes may begin with them. Tags in other messages say nothing.
        """
        begun = self.continued.lstrip()
        if begun:
            return begun.startswith(opening) and closing not in begun
        end = self.prompt.rstrip()
        return True if end.endswith(opening) else False if end.endswith(closing) else None


@dataclass(frozen=True, kw_only=True)
class ParserSample:
    """What a model wrote, and the joined events it must become (None: any that keep the contract)."""

    text: str
    context: ParserContext = field(default_factory=ParserContext)
    events: tuple[Event, ...] | None = None


class OutputParser(Protocol):
    """One choice's text on its way to events.

    The joined events (`joined`) of a text are the same however it is cut into calls. Nothing is lost: what is no
    call, or no complete one, comes as text. Whitespace between markup may go.
    """

    def feed(self, text: str) -> Iterable[Event]:
        """The events that are certain once `text` has come; the iterable is read to its end at once."""

    def finish(self) -> Iterable[Event]:
        """What is left when the output ends, perhaps in the middle of a call. Nothing is fed afterwards."""


MakeParser = Callable[[ParserContext], OutputParser]


@dataclass(frozen=True)
class ActiveParser:
    """A parser that the server was started with. `special_ids`: special tokens whose text it has to see. `spec`: its
    own description.
    """

    spec: OutputParserSpec
    make: MakeParser
    special_ids: frozenset[int]

    def grammar(self, context: ParserContext) -> CallGrammar | None:
        """How calls of the context's tools are written, or None where the parser does not say."""
        if self.spec.grammar is None:
            return None
        grammar: CallGrammar = load(self.spec.grammar)(context)
        return grammar


@dataclass(frozen=True)
class RequestParsing:
    """How one request's answers are parsed: `make` for each choice."""

    parsers: tuple[ActiveParser, ...]
    context: ParserContext

    @property
    def special_ids(self) -> frozenset[int]:
        """The special tokens that must not be skipped: `TextRules.keep_special_ids`."""
        return frozenset[int]().union(*(parser.special_ids for parser in self.parsers))

    @property
    def reasons(self) -> bool:
        """Whether one of the parsers looks for reasoning."""
        return any(parser.spec.kind == "reasoning" for parser in self.parsers)

    @cached_property
    def beginning(self) -> Beginning | None:
        """What the parsers make of the message that the answers go on with, if there is one."""
        begun = self.context.continued
        return begin(self._make, begun, self.context.call_tags) if begun else None

    def make(self) -> OutputParser:
        """The parser of one choice."""
        return self._make() if self.beginning is None else Resumed(self._make(), self.beginning)

    def _make(self) -> OutputParser:
        made = [parser.make(self._before) for parser in self.parsers]
        return made[0] if len(made) == 1 else Chained(*made)

    @cached_property
    def _before(self) -> ParserContext:
        """The context without what the message has so far."""
        begun, prompt = self.context.continued.strip(), self.context.prompt.rstrip()  # templates trim messages
        prompt = prompt.removesuffix(begun) if prompt.endswith(begun) else ""  # and rewrite them
        return replace(self.context, prompt=prompt, continued="")


@dataclass(frozen=True, kw_only=True)
class OutputParsers:
    """The parsers of a server: those that `--tool_call_parser` and `--reasoning_parser` name, or None.

    `tool_names`: the tool parsers that there are; `template_names`: those of them that bring a chat template.
    """

    tool: ActiveParser | None = None
    reasoning: ActiveParser | None = None
    tool_names: tuple[str, ...] = ()
    template_names: tuple[str, ...] = ()

    def bind(self, context: ParserContext) -> RequestParsing | None:
        """How a request's answers are parsed: its reasoning, and its calls if it has tools; None if neither."""
        parsers = (self.reasoning, self.tool if context.tools else None)
        active = tuple(parser for parser in parsers if parser is not None)
        if context.tools and self.tool is not None:
            context = replace(context, call_tags=self.tool.spec.call_tags)
        return RequestParsing(active, context) if active else None


class Chained:
    """A parser for the text that another one leaves."""

    def __init__(self, first: OutputParser, second: OutputParser):
        self._first = first
        self._second = second

    def feed(self, text: str) -> Iterator[Event]:
        """OutputParser."""
        yield from self._through(self._first.feed(text))

    def finish(self) -> Iterator[Event]:
        """OutputParser."""
        yield from self._through(self._first.finish())
        yield from self._second.finish()

    def _through(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, TextDelta):
                yield from self._second.feed(event.text)
            else:
                yield event


def open_parsers(specs: Sequence[OutputParserSpec], config: Model, tokenizer: Tokenizer) -> OutputParsers:
    """The parsers that `config` names, for a worker; the supervisor has chosen (`ParserChoice.named`)."""
    chosen = check_parsers(specs, config)
    return OutputParsers(
        tool_names=tuple(sorted(spec.name for spec in specs if spec.kind == "tool")),
        template_names=tuple(sorted(named_templates(specs))),
        **{kind: open_parser(spec, tokenizer) for kind, spec in chosen.items()},
    )


def open_parser(spec: OutputParserSpec, tokenizer: Tokenizer) -> ActiveParser:
    """One parser, with the ids of the special tokens it reads; those that this tokenizer lacks do not matter."""
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in spec.special_tokens)
    ids = frozenset(ids[0] for ids in encoded if len(ids) == 1) & tokenizer.special_ids
    return ActiveParser(spec, load(spec.make), ids)
