"""Grammars of tool calls let through what models write. The conformance check draws calls, which the parsers read."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from llmcore.api import OutputParserSpec, ProcessorContext, Tokenizer
from llmcore.api.text import (
    CallGrammar,
    ParserContext,
    load_tokenizer,
)
from llmcore.registry.loader import load
from llmcore_devtools import registry_of
from llmcore_devtools.tokenizer import EOS, write_tokenizer
from llmcore_guided.processor import Guided, make
from llmcore_server.chat.call_grammars import forced_calls, free_calls

VOCAB = 301
SPECS = {spec.name: spec for spec, _ in registry_of("parsers").specs(OutputParserSpec) if spec.kind == "tool"}
WITH = sorted(name for name, spec in SPECS.items() if spec.grammar is not None)
TOOLS: dict[str, Any] = {
    "weather": {
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 6}, "when": {"$ref": "#/$defs/When"}},
            "required": ["place"],
            "additionalProperties": False,
            "$defs": {"When": {"enum": ["now", 'l"ater']}},
        },
        "strict": True,
    },
    "now": {"parameters": {"type": "object", "properties": {}, "additionalProperties": False, "minProperties": 0}},
}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ProcessorContext:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))

    @cache
    def opened() -> Tokenizer:
        return tokenizer

    return ProcessorContext(VOCAB, (EOS,), opened, stop_ids=(EOS,))


def grammar_of(name: str) -> CallGrammar:
    grammar: CallGrammar = load(SPECS[name].grammar or "")(ParserContext(tools=TOOLS))
    return grammar


def allowed(processor: Guided) -> list[int]:
    bits = np.unpackbits(processor.mask().view(np.uint8), bitorder="little")
    return [int(bit) for bit in np.flatnonzero(bits)]


def lets(context: ProcessorContext, args: dict[str, Any], text: str) -> bool:
    processor = make(args, context)(np.zeros(1, np.int32))
    ended = False
    for token in context.tokenizer().encode(text, add_special_tokens=False):
        if ended or token not in allowed(processor):
            return False
        processor.accept(token)
        ended = processor.finished()
    return ended or EOS in allowed(processor)


def test_who_has_a_grammar() -> None:
    assert {"qwen25", "llama3", "mistral", "deepseek_v3", "deepseek_v31"} <= set(WITH)


WRITTEN = {
    "qwen25": '<tool_call>\n{"name": "weather", "arguments": {"place": "R"}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "weather", "parameters": {"place": "R"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"place": "R"}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"place": "R"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"place": "R"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_free_answers_are_text_or_calls_that_fit(context: ProcessorContext, name: str) -> None:
    grammar = grammar_of(name)
    for single in (True, False):
        args = free_calls(grammar, TOOLS, single=single)
        assert lets(context, args, WRITTEN[name])
        assert lets(context, args, "Just text; a < b [3]")
        assert lets(context, args, f"Let me see.\n{WRITTEN[name]}")
        assert not lets(context, args, WRITTEN[name].replace("place", "plac"))
        assert not lets(context, args, "So: " + WRITTEN[name].replace("weather", "whether"))
    forced = forced_calls(grammar, TOOLS, single=True)
    assert lets(context, forced, WRITTEN[name]) and not lets(context, forced, "Just text")
    if grammar.bare:
        bare = WRITTEN[name].partition(">")[2]
        assert lets(context, forced, bare) and lets(context, free_calls(grammar, TOOLS, single=True), bare)
        assert not lets(context, free_calls(grammar, TOOLS, single=True), bare.replace("place", "plac"))


def test_a_strict_schema_that_cannot_be_enforced_is_refused(context: ProcessorContext) -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (False, True):
        tools = {"f": {"parameters": unique, "strict": strict}}
        grammar: CallGrammar = load(SPECS["qwen25"].grammar or "")(ParserContext(tools=tools))
        args = forced_calls(grammar, tools, single=True)
        if strict:
            with pytest.raises(ValueError, match=r"^the parameters of 'f': uniqueItems: this cannot be enforced"):
                make(args, context)
        else:
            make(args, context)
