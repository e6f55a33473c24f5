"""Output parsers: the parsers of a server, and their work on one choice's text.

The reasoning parser reads first, and the tool parser reads the remaining text. Each choice has its own parsers, so
they can keep state and never see another request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from llmcore.api.protocols import Tokenizer
from llmcore.api.specs import OutputParserSpec
from llmcore.config import Model
from llmcore.registry.loader import load
from llmcore.text.call_grammar import CallGrammar
from llmcore.text.chosen_template import named_templates
from llmcore.text.events import Event, TextDelta
from llmcore.text.parser_choice import check_parsers
from llmcore.text.resumed import Beginning, Resumed, begin


@dataclass(frozen=True, kw_only=True)
class ParserContext:
    """The request whose answers a parser reads."""

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The functions that the model may call, by name, as the client described them (`description`, `parameters`: a
    JSON schema, ...). A call to any other name is text."""
    tool_choice: str = "auto"
    """OpenAI's `tool_choice`."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """The request's `chat_template_kwargs`."""
    prompt: str = ""
    """The rendered conversation. Its end shows where the model goes on."""
    continued: str = ""
    """The text of the last message, if the model continues that message; the prompt ends with it. A parser reads this
    text first, as a part of the answer. So the context for a parser's `make` has "" here, and `prompt` without it."""
    call_tags: tuple[str, ...] = ()
    """Texts that begin calls (`OutputParserSpec.call_tags` of the request's tool parser), for a reasoning parser."""

    def thinking(self, opening: str, closing: str) -> bool | None:
        """True if the answer begins inside reasoning between these tags, False if it begins after it.

        None if that is open: the answer itself may begin with the opening tag. Tags in other messages do not count.
        """
        begun = self.continued.lstrip()
        if begun:
            return begun.startswith(opening) and closing not in begun
        end = self.prompt.rstrip()
        return True if end.endswith(opening) else False if end.endswith(closing) else None


@dataclass(frozen=True, kw_only=True)
class ParserSample:
    """A model's text, and the joined events that a parser must make of it (None: any that keep the contract)."""

    text: str
    context: ParserContext = field(default_factory=ParserContext)
    events: tuple[Event, ...] | None = None


class OutputParser(Protocol):
    """Turns the text of one choice into events.

    The joined events (`joined`) of a text do not depend on how the text is cut into `feed` calls. No text is lost: an
    incomplete call and everything that is not a call become text. Only whitespace between markup may be dropped.
    """

    def feed(self, text: str) -> Iterable[Event]:
        """The events that are certain after `text`. The caller reads the iterable to its end at once."""

    def finish(self) -> Iterable[Event]:
        """The remaining events when the output ends, perhaps in the middle of a call. `feed` is not called again."""


MakeParser = Callable[[ParserContext], OutputParser]


@dataclass(frozen=True)
class ActiveParser:
    """A parser of a running server. `special_ids`: the special tokens whose text it has to read."""

    spec: OutputParserSpec
    make: MakeParser
    special_ids: frozenset[int]

    def grammar(self, context: ParserContext) -> CallGrammar | None:
        """The grammar for calls of the context's tools, or None if the parser does not have one."""
        if self.spec.grammar is None:
            return None
        grammar: CallGrammar = load(self.spec.grammar)(context)
        return grammar


@dataclass(frozen=True)
class RequestParsing:
    """The parsers of one request. Call `make` for each choice."""

    parsers: tuple[ActiveParser, ...]
    context: ParserContext

    @property
    def special_ids(self) -> frozenset[int]:
        """The special tokens that must not be skipped: `TextRules.keep_special_ids`."""
        return frozenset[int]().union(*(parser.special_ids for parser in self.parsers))

    @property
    def reasons(self) -> bool:
        """True if one of the parsers reads reasoning."""
        return any(parser.spec.kind == "reasoning" for parser in self.parsers)

    @cached_property
    def beginning(self) -> Beginning | None:
        """The parsers' result for the message that the answers continue; None if they continue none."""
        begun = self.context.continued
        return begin(self._make, begun, self.context.call_tags) if begun else None

    def make(self) -> OutputParser:
        """A new parser for one choice."""
        return self._make() if self.beginning is None else Resumed(self._make(), self.beginning)

    def _make(self) -> OutputParser:
        made = [parser.make(self._before) for parser in self.parsers]
        return made[0] if len(made) == 1 else Chained(*made)

    @cached_property
    def _before(self) -> ParserContext:
        """The context without the text of the message that the answers continue."""
        # Templates trim messages, and some rewrite them.
        begun, prompt = self.context.continued.strip(), self.context.prompt.rstrip()
        prompt = prompt.removesuffix(begun) if prompt.endswith(begun) else ""
        return replace(self.context, prompt=prompt, continued="")


@dataclass(frozen=True, kw_only=True)
class OutputParsers:
    """The parsers of a server: those that `--tool_call_parser` and `--reasoning_parser` name, or None.

    `tool_names`: all installed tool parsers. `template_names`: the tool parsers that bring a chat template.
    """

    tool: ActiveParser | None = None
    reasoning: ActiveParser | None = None
    tool_names: tuple[str, ...] = ()
    template_names: tuple[str, ...] = ()

    def bind(self, context: ParserContext) -> RequestParsing | None:
        """The parsers for one request: for reasoning, and for calls if it has tools. None if it needs no parser."""
        parsers = (self.reasoning, self.tool if context.tools else None)
        active = tuple(parser for parser in parsers if parser is not None)
        if context.tools and self.tool is not None:
            context = replace(context, call_tags=self.tool.spec.call_tags)
        return RequestParsing(active, context) if active else None


class Chained:
    """Two parsers in a row: the second one reads the text that the first one leaves."""

    def __init__(self, first: OutputParser, second: OutputParser):
        self._first = first
        self._second = second

    def feed(self, text: str) -> Iterator[Event]:
        """See OutputParser."""
        yield from self._through(self._first.feed(text))

    def finish(self) -> Iterator[Event]:
        """See OutputParser."""
        yield from self._through(self._first.finish())
        yield from self._second.finish()

    def _through(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, TextDelta):
                yield from self._second.feed(event.text)
            else:
                yield event


def open_parsers(specs: Sequence[OutputParserSpec], config: Model, tokenizer: Tokenizer) -> OutputParsers:
    """The parsers that `config` names, for a worker. The supervisor has chosen them (`ParserChoice.named`)."""
    chosen = check_parsers(specs, config)
    return OutputParsers(
        tool_names=tuple(sorted(spec.name for spec in specs if spec.kind == "tool")),
        template_names=tuple(sorted(named_templates(specs))),
        **{kind: open_parser(spec, tokenizer) for kind, spec in chosen.items()},
    )


def open_parser(spec: OutputParserSpec, tokenizer: Tokenizer) -> ActiveParser:
    """One parser, with the ids of the special tokens that it reads, as far as the tokenizer has them."""
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in spec.special_tokens)
    ids = frozenset(ids[0] for ids in encoded if len(ids) == 1) & tokenizer.special_ids
    return ActiveParser(spec, load(spec.make), ids)
