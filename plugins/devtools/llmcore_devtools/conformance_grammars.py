"""Conformance of a parser's grammar: it compiles, and the parser reads its calls. Needs guided decoding."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from llmcore.api.processors import LogitsProcessorSpec, ProcessorContext
from llmcore.api.protocols import Tokenizer
from llmcore.config import Config
from llmcore.registry.loader import collect, load
from llmcore.text.call_grammar import CallGrammar
from llmcore.text.events import TextDelta, ToolCallBegun, ToolCallDelta, joined
from llmcore.text.parsing import MakeParser, ParserContext
from llmcore.text.tokenizer import load_tokenizer
from llmcore_server.http.guided import NAME

from llmcore_devtools.conformance import all_problems
from llmcore_devtools.tokenizer import EOS, write_tokenizer

TOOLS: dict[str, Any] = {
    "weather": {
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 6}, "day": {"enum": ["now", 'l"ater']}},
            "required": ["place"],
            "additionalProperties": False,
        },
        "strict": True,
    },
    "now": {"parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
"""The functions that the check's calls may call."""

VOCAB = 301
_SEEDS = 3
_LONGEST = 3000
"""Most tokens of a random answer; a longer one fails."""


def check_call_grammar(make_grammar: Callable[[ParserContext], CallGrammar], make: MakeParser) -> None:
    """The parser reads forced answers as calls with valid arguments, and a free answer can begin with text.

    Raises Nonconformance, or AssertionError if no installed plugin brings guided decoding.
    """
    tokenizer = _tokenizer()
    compiled, context = _guided(tokenizer), ParserContext(tools=TOOLS)
    grammar = make_grammar(context)
    assert isinstance(grammar, CallGrammar), f"it is a {type(grammar).__name__}, not an api.text.CallGrammar"
    with all_problems() as problems:
        for single in (True, False):
            with problems.of("forced to one call" if single else "forced to calls"):
                start = compiled(grammar.forced(TOOLS, single=single))
                for seed in range(_SEEDS):
                    _check_calls(make, context, _drawn(start, seed, tokenizer), single)
            with problems.of("free, at most one call" if single else "free"):
                begun = compiled(grammar.free(TOOLS, single=single))(np.zeros(1, np.int32))
                letter = tokenizer.encode("H", add_special_tokens=False)[0]
                assert letter in _allowed(begun), "an answer cannot begin with plain text"


def _check_calls(make: MakeParser, context: ParserContext, text: str, single: bool) -> None:
    parser = make(context)
    events = list(joined([*parser.feed(text), *parser.finish()]))
    names = [event.name for event in events if isinstance(event, ToolCallBegun)]
    arguments = [event.arguments for event in events if isinstance(event, ToolCallDelta)]
    assert names and len(names) == len(arguments), f"the parser finds no whole call in {text!r}"
    assert len(names) == 1 or not single, f"the parser finds {len(names)} calls in {text!r}"
    left = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert not left, f"the parser leaves the text {left!r} of {text!r}"
    for name, given in zip(names, map(json.loads, arguments), strict=True):
        fits = {"place"} <= set(given) <= {"place", "day"} if name == "weather" else given == {}
        assert fits, f"the parser reads the arguments {given} of {name} in {text!r}"


def _tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write_tokenizer(Path(folder)))


def _guided(tokenizer: Tokenizer) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a function that compiles a grammar, given as arguments of `guided`, to start(prompt)."""
    processors = (spec for spec, _ in collect(Config()).specs(LogitsProcessorSpec))
    spec = next((spec for spec in processors if spec.name == NAME), None)
    assert spec is not None, "no installed plugin can compile it: pip install plugin-guided"
    make, context = load(spec.make), ProcessorContext(VOCAB, (EOS,), lambda: tokenizer, stop_ids=(EOS,))
    return lambda args: make(args, context)


def _drawn(start: Any, seed: int, tokenizer: Tokenizer) -> str:
    """A random answer, drawn until it ends."""
    processor, random = start(np.zeros(1, np.int32)), np.random.default_rng(seed)
    drawn: list[bytes] = []
    while len(drawn) < _LONGEST:
        ids = _allowed(processor)
        token = EOS if EOS in ids and random.random() < 0.5 else int(random.choice(ids))
        processor.accept(token)
        drawn += [tokenizer.token_bytes(token)] if token != EOS else []
        if processor.finished():
            return b"".join(drawn).decode()
    raise AssertionError(f"an answer goes on after {_LONGEST} tokens: {b''.join(drawn)[:200]!r}")


def _allowed(processor: Any) -> list[int]:
    bits = np.unpackbits(processor.mask().view(np.uint8), bitorder="little")
    return [int(bit) for bit in np.flatnonzero(bits)]
