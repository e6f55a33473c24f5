"""The process that tries clients' grammars. The engine kills it when one takes too long; streams go on.

    python -m llmcore_guided.trial

The process reads and answers messages (`talk`) on the socket that is its standard input, and ends when the socket
closes. It translates grammars because Python's part of that would hold the engine's GIL. It compiles them because only
the end of its process can stop llguidance.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import threading
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from llmcore_guided.grammars import Schema, grammar_of, wanted
from llmcore_guided.limits import LIMITS, STACK_BYTES
from llmcore_guided.sayings import said, unenforced
from llmcore_guided.talk import Answer, Question, Words, receive, send

MEMORY_BYTES = 2 << 30
"""Limit of the address space, stack included. A grammar that needs more ends this process alone."""

NICE = 5
"""The niceness of this process: streams come before grammars."""

DEEPEST = 10_000
"""Python's recursion limit. The stack has room for this many calls."""

_SPECIAL = b"\xff"


def main() -> None:
    """Answer until the socket is closed."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF,))
    sys.setrecursionlimit(DEEPEST)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(socket.socket(fileno=os.dup(0)),))
    thread.start()
    thread.join()


def _serve(engine: socket.socket) -> None:
    try:
        words = msgspec.msgpack.decode(receive(engine), type=Words)
        tokens = _tokens(words)
        send(engine, Answer())
        os.nice(NICE)
        while True:
            question = msgspec.msgpack.decode(receive(engine), type=Question)
            signal.setitimer(signal.ITIMER_PROF, question.seconds)
            answer = _answer(question, tokens)
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(engine, answer)
    except (EOFError, OSError):
        return


def _tokens(words: Words) -> LLTokenizer:
    """The special tokens under their own ids, and one token per byte. They spell the same texts as all tokens do."""
    tokens = [b""] * words.size + [bytes((byte,)) for byte in range(255)]
    for token, name in words.special.items():
        tokens[token] = _SPECIAL + name.encode()
    wrapper = TokenizerWrapper(_Bytes(tokens, words.eos_ids[0], sorted(words.special), words.size))
    return LLTokenizer(wrapper, eos_token=list(words.eos_ids), slices=[])


def _answer(question: Question, tokens: LLTokenizer) -> Answer:
    args = json.loads(question.args)
    try:
        grammar = grammar_of(wanted(args), question.tags.get, close=question.closed)
        matcher = LLMatcher(tokens, grammar.text, limits=LIMITS, log_level=0)
        if matcher.is_error():
            raise ValueError(_found_in(grammar.schemas) or said(matcher.get_error(), places=grammar.own_places))
        for schema in grammar.schemas:
            _check_strict(schema)
    except ValueError as error:
        return Answer(str(error), wrong=True)
    except RecursionError:
        return Answer("it is too deeply nested", wrong=True)
    except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
        return Answer(f"it cannot be compiled: {type(error).__name__}", wrong=True)
    return Answer(grammar.text, unenforced=tuple(unenforced(matcher.get_grammar_warnings())))


def _found_in(schemas: tuple[Schema, ...]) -> str | None:
    """Returns the mistake in the first of `schemas` that has one by itself."""
    for schema in schemas:
        failed, messages = _validated({"x-guidance": schema.value["x-guidance"]})
        if failed:
            return f"whitespace_pattern: {said(messages[0])}"
        failed, messages = _validated(schema.value)
        if failed:
            return _of(schema) + said(messages[0])
    return None


def _check_strict(schema: Schema) -> None:
    """Raise ValueError if a strict schema has keywords that are not enforced."""
    if not schema.strict:
        return
    keywords = unenforced(_validated(schema.value)[1])
    if keywords:
        names = ", ".join(keywords)
        raise ValueError(f"{_of(schema)}{names}: this cannot be enforced; leave it out, or do not ask for strict")


def _validated(schema: Any) -> tuple[bool, list[str]]:
    text = json.dumps({"grammars": [{"json_schema": schema}]})
    return LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)


def _of(schema: Schema) -> str:
    return f"{schema.of}: " if schema.of else ""


class _Bytes:
    """The byte tokenizer that llguidance's TokenizerWrapper wraps."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos: int, special: list[int], first: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos
        self.special_token_ids = special
        self._first = first

    def __call__(self, text: Any) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        return [self._first + byte for byte in data]


if __name__ == "__main__":
    main()
