"""Conformance of output parsers: every chunking of a text gives the same events, and no text is lost. No torch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmcore.api.specs import OutputParserSpec
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry
from llmcore.text.chosen_template import ChosenTemplate
from llmcore.text.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallBegun,
    ToolCallDelta,
    ToolCallEnded,
    joined,
)
from llmcore.text.parsing import MakeParser, ParserContext, ParserSample
from llmcore.text.templates import ChatTemplate

from llmcore_devtools.conformance import all_problems, contributed, loaded
from llmcore_devtools.conformance_contributions import TEXTS
from llmcore_devtools.conformance_grammars import check_call_grammar

_CUTTINGS = 20
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
}
_KINDS = {
    "tool": (TextDelta, ToolCallBegun, ToolCallDelta, ToolCallEnded),
    "reasoning": (TextDelta, ReasoningDelta),
}


def parsed(make: MakeParser, context: ParserContext, pieces: Iterable[str]) -> list[Event]:
    """The joined events of a text that arrives in `pieces`."""
    parser = make(context)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish()
    return list(joined(events))


def check_register_output_parsers(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every parser gives the same events for every chunking of its samples, of their beginnings and of plain text.

    Calls of functions that a request does not have become text, and so do calls that end before their name is known.
    The parser reads the calls that its grammar forces, and those that its chat template writes.

    `samples`: files with outputs, in addition to those of the specs.
    """
    parsers = contributed(registry, plugin, OutputParserSpec)
    given = [ParserSample(text=path.read_text(encoding="utf-8")) for path in samples]
    with all_problems() as problems:
        for spec in parsers:
            with problems.of(f"{spec.kind} parser {spec.name}"):
                _check_parser(spec, given)
    return len(parsers)


def _check_parser(spec: OutputParserSpec, given: Sequence[ParserSample]) -> None:
    stated: Callable[[], Iterable[ParserSample]] = loaded(spec.samples, "samples") if spec.samples else tuple
    mine = [*stated(), *given]
    assert mine, "it states no samples; give its spec some, or this check"
    make = loaded(spec.make, "make")
    with all_problems() as problems:
        for sample in (*mine, *(ParserSample(text=text) for text in TEXTS)):
            with problems.of(repr(sample.text)):
                _check_sample(spec.kind, make, sample)
        for text in TEXTS:
            with problems.of(f"{text!r} without tools"):
                left = _text(parsed(make, ParserContext(), [text]))
                assert left.strip() == text.strip(), f"it becomes {left!r}"
        for sample in mine if spec.kind == "tool" else ():
            with problems.of(f"{sample.text!r} without tools"):
                left = _text(parsed(make, replace(sample.context, tools={}), [sample.text]))
                assert left == sample.text, f"it becomes {left!r}"
        if spec.grammar is not None:
            with problems.of("grammar"):
                check_call_grammar(loaded(spec.grammar, "grammar"), make)
        if spec.template is not None:
            with problems.of("template"):
                _check_template(load(spec.template), make)


def _check_sample(kind: str, make: MakeParser, sample: ParserSample) -> None:
    text, context = sample.text, sample.context
    found = parsed(make, context, [text])
    _check_events(kind, found, text)
    if sample.events is not None:
        assert found == list(sample.events), f"it becomes {found}, not {list(sample.events)}"
    for pieces in _cuttings(text):
        assert parsed(make, context, pieces) == found, f"cut into {pieces}, it becomes other events"
    for end in range(len(text)):
        whole = parsed(make, context, [text[:end]])
        _check_events(kind, whole, text[:end])
        assert parsed(make, context, text[:end]) == whole, f"the events of {text[:end]!r} depend on how it is cut"


def _check_template(chosen: Any, make: MakeParser) -> None:
    """The template shows tools, and the parser reads a call that the template writes into a conversation."""
    assert isinstance(chosen, ChosenTemplate), f"it is a {type(chosen).__name__}, not an api.text.ChosenTemplate"
    template = ChatTemplate({"default": chosen.source}, {})
    asked = {"role": "user", "content": "How warm is it in Rome?"}
    call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    opened = template.render([asked], tools=[_TOOL])
    assert "weather" in opened, "it does not show the request's tools"
    whole = template.render([asked, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=[_TOOL])
    written = whole.removeprefix(opened) if whole.startswith(opened) else whole.partition(asked["content"])[2]
    events = parsed(make, ParserContext(tools={"weather": _TOOL["function"]}), [written])
    named = [event.name for event in events if isinstance(event, ToolCallBegun)]
    assert named == ["weather"], f"the parser finds the calls {named} in {written!r}"
    (given,) = [event.arguments for event in events if isinstance(event, ToolCallDelta)] or [""]
    assert json.loads(given or "{}") == {"place": "Rome"}, f"the parser reads the arguments {given!r} in {written!r}"


def _cuttings(text: str) -> Iterable[list[str]]:
    """The text cut into characters, and into random pieces, some of them empty."""
    yield list(text)
    draw = random.Random(0)
    for _ in range(_CUTTINGS):
        ends = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 12)))
        yield [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def _check_events(kind: str, events: Sequence[Event], text: str) -> None:
    """The events have the right kinds and order, and a text without a call is unchanged."""
    begun, ended = 0, set()
    for event in events:
        assert isinstance(event, _KINDS[kind]), f"a {kind} parser cannot give {event}"
        if isinstance(event, ToolCallBegun):
            assert event.index == begun, f"{text!r}: call {begun} begins as {event.index}"
            begun += 1
        elif isinstance(event, ToolCallDelta | ToolCallEnded):
            open_ = event.index == begun - 1 and event.index not in ended
            assert open_, f"{text!r}: {event} belongs to no open call"
            if isinstance(event, ToolCallEnded):
                ended.add(event.index)
    if kind == "tool" and not begun:
        assert _text(events) == text, f"of {text!r} only {_text(events)!r} is left"


def _text(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta | ReasoningDelta))
