"""plugin-guided: what its masks let through fits, whatever is drawn; what cannot be meant is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcore.api import ProcessorContext, RequestError, Tokenizer, words_of
from llmcore.api.text import load_tokenizer
from llmcore.testing import check_plugin, registry_of
from llmcore.testing.tokenizer import EOS, write_tokenizer
from llmcore_guided import compiler
from llmcore_guided.processor import Guided, make
from pydantic import BaseModel, ConfigDict, Field

VOCAB = 301
"""More than the tokenizer has."""


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=5)]
    age: Annotated[int, Field(ge=0, le=150)]
    tags: Annotated[list[Literal["a", "b\n", "ü"]], Field(max_length=2)]


SCHEMA = Person.model_json_schema()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def context(tokenizer: Tokenizer) -> ProcessorContext:
    @cache
    def opened() -> Tokenizer:
        return tokenizer

    return ProcessorContext(VOCAB, (EOS,), opened, stop_ids=(EOS,))


PATIENCE = compiler.COMPILE_SECONDS


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    """What is compiled or found wrong does not depend on how busy the machine is, but where a test says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "COMPILE_SECONDS", 60.0)
        patch.setattr(compiler, "PATIENCE_SECONDS", 60.0)
        patch.setattr(compiler, "TRIED_SECONDS", 60.0)
        yield


def one(context: ProcessorContext, **args: Any) -> Guided:
    return make(args, context)(np.zeros(1, np.int32))


def allowed(processor: Guided) -> list[int]:
    words = processor.mask()
    assert words.shape == (words_of(VOCAB),) and words.dtype == np.int32
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return [int(bit) for bit in np.flatnonzero(bits)]


def play(processor: Guided, choose: Callable[[list[int]], int], most: int = 400) -> list[int]:
    """The tokens of an answer, its end included."""
    tokens: list[int] = []
    while len(tokens) < most:
        token = choose(allowed(processor))
        processor.accept(token)
        tokens.append(token)
        if processor.finished():
            return tokens
    raise AssertionError(f"no end after {most} tokens")


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(t) for t in tokens if t != EOS).decode()


def spell(processor: Guided, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text's own tokens are let through and may end the answer."""
    ended = False
    for token in tokenizer.encode(text, add_special_tokens=False):
        if ended or token not in allowed(processor):
            return False
        processor.accept(token)
        ended = processor.finished()
    return ended or EOS in allowed(processor)


def test_the_plugin_keeps_the_contract() -> None:
    assert check_plugin(registry_of("guided"), "guided") == {"register_logits_processors": 1}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_is_drawn_fits(context: ProcessorContext, tokenizer: Tokenizer, seed: int) -> None:
    random = np.random.default_rng(seed)
    fits: list[tuple[dict[str, Any], Callable[[str], object]]] = [
        ({"json": SCHEMA, "whitespace": False}, Person.model_validate_json),
        ({"regex": r"[a-c]{1,3}(/[0-9]|\.é)"}, lambda text: check(re.fullmatch(r"[a-c]{1,3}(/[0-9]|\.é)", text))),
        ({"choice": ["yes", "no", 'o"\\\n\x01ï😀']}, lambda text: check(text in ("yes", "no", 'o"\\\n\x01ï😀'))),
        ({"grammar": 'start: "(" start ")" | /[0-9]/'}, lambda text: check(re.fullmatch(r"\(*\d\)*", text))),
        ({"grammar": 'root ::= "<" item ("," item){0,3} ">"\nitem ::= [xy]'}, lambda t: check(set(t) <= set("<xy,>"))),
    ]
    for args, validate in fits:
        validate(text_of(tokenizer, play(one(context, **args), lambda ids: int(random.choice(ids)))))


def check(condition: object) -> None:
    assert condition


def test_thousands_of_choices(context: ProcessorContext, tokenizer: Tokenizer) -> None:
    random, texts = np.random.default_rng(0), [f"value {i}" for i in range(5000)]
    assert text_of(tokenizer, play(one(context, choice=texts), lambda ids: int(random.choice(ids)))) in texts


@pytest.mark.parametrize(
    ("args", "text", "fits"),
    [
        ({"json": json.dumps(SCHEMA)}, '{"name": "a", "age": 3, "tags": []}', True),
        ({"json": SCHEMA, "whitespace": False}, '{"name": "a"}', False),
        ({"json_object": True}, '{"a": [1, {"b": null}]}', True),
        ({"json_object": True}, "[1]", False),
        ({"json": True}, "[1]", True),
        ({"json": {"type": "string", "pattern": "^a+$"}}, '"aaa"', True),
        (
            {"json": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "lenient": True},
            "[1,1]",
            True,
        ),
        ({"regex": "a?"}, "", True),
        ({"regex": "a+"}, "", False),
        ({"choice": ["ab", "abc"]}, "ab", True),
        ({"choice": ["ab", "abc"]}, "abcd", False),
        ({"regex": "a", "thought": {"open": "<t>", "close": "</t>", "opened": False}}, "a", True),
        ({"regex": "a", "thought": {"open": "<t>", "close": "</t>", "opened": False}}, "<t>so\nit is</t>\na", True),
        ({"regex": "a", "thought": {"open": "<t>", "close": "</t>", "opened": True}}, "hm</t>a", True),
        ({"regex": "a", "thought": {"open": "<t>", "close": "</t>", "opened": True}}, "hm</t>b", False),
        ({"regex": "a", "thought": {"open": "<t>", "close": "</t>", "opened": True}}, "a", False),
        ({"lark": "start: (before_call /x+;/)* rest\nrest: /(?s:.*)/", "tags": {"call": "CALL"}}, "a CALLxx; b", True),
        (
            {"lark": "start: (before_call /x+;/)* rest\nrest: /(?s:.*)/", "tags": {"call": "CALL"}},
            "a CALLyy; b",
            False,
        ),
    ],
)
def test_texts_that_fit_and_texts_that_do_not(
    context: ProcessorContext, tokenizer: Tokenizer, args: dict[str, Any], text: str, fits: bool
) -> None:
    assert spell(one(context, **args), tokenizer, text) == fits


def test_the_end_is_allowed_where_the_grammar_is_complete(context: ProcessorContext) -> None:
    a, b = context.tokenizer().encode("ab", add_special_tokens=False)
    processor = one(context, regex="[ab]{1,2}")
    assert EOS not in allowed(processor)
    processor.accept(a)
    assert EOS in allowed(processor) and not processor.finished()
    processor.accept(b)
    assert processor.finished()


def test_an_end_that_the_request_ignores_is_hidden_while_something_else_may_come(context: ProcessorContext) -> None:
    a, b = context.tokenizer().encode("ab", add_special_tokens=False)
    ignoring = ProcessorContext(VOCAB, (EOS,), context.tokenizer, stop_ids=())
    processor = one(ignoring, regex="[ab]{1,2}")
    processor.accept(a)
    assert allowed(processor) == [a, b]
    processor.accept(b)
    assert processor.finished()
    assert allowed(one(ignoring, grammar="start: ")) == [EOS]


def test_choices_of_a_request_share_nothing_but_the_grammar(context: ProcessorContext) -> None:
    a, b, c = context.tokenizer().encode("abc", add_special_tokens=False)
    start = make({"regex": "[ab]{2}c"}, context)
    first, second = start(np.zeros(1, np.int32)), start(np.zeros(1, np.int32))
    first.accept(a)
    first.accept(a)
    assert (allowed(first), allowed(second)) == ([c], [a, b])


def test_special_tokens_and_ids_without_text_are_never_let_through(
    context: ProcessorContext, tokenizer: Tokenizer
) -> None:
    ids = allowed(one(context, regex="(?s:.*)"))
    assert EOS in ids and not (set(ids) - {EOS}) & tokenizer.special_ids
    assert max(ids) < tokenizer.vocab_size < VOCAB
    special = min(tokenizer.special_ids - {EOS}, default=None)
    if special is not None:
        named = one(context, lark="start: tag /x/", tags={"tag": tokenizer.token(special)})
        assert allowed(named) == [special]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "not none"),
    ({"regex": "a", "json_object": True}, "not json_object and regex"),
    ({"regex": "a", "strict": 1}, "there is no argument 'strict'"),
    ({"regex": 3}, "the regex has to be a text"),
    ({"regex": ""}, "not empty"),
    ({"regex": "(["}, "regex"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"[^\s\S]"}, "nothing fits it"),
    ({"regex": "a" * 20000}, "at most 16384"),
    ({"regex": "\ud800"}, "surrogate"),
    ({"choice": []}, "list of texts"),
    ({"choice": "yes"}, "list of texts"),
    ({"choice": [""]}, "list of texts"),
    ({"json_object": False}, "json_object has to be true"),
    ({"json": "{"}, "no JSON"),
    ({"json": "[1]"}, "a JSON schema is an object"),
    ({"json": 3}, "a JSON schema"),
    ({"json": False}, "allows nothing"),
    ({"json": {"type": "strin"}}, "strin"),
    ({"json": {"enum": []}}, "Unsatisfiable"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
    ({"json": {"$ref": "#"}}, "nothing fits it"),
    ({"json": "[" * 100000}, "no JSON"),
    ({"json": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}}, "unclosed group"),
    ({"grammar": "hello world"}, "neither Lark nor GBNF"),
    ({"grammar": 'start: "a" |('}, "Expected"),
    ({"grammar": "start: start"}, "nothing fits it"),
    ({"grammar": "start: x"}, "x"),
    ({"grammar": "start: " + "(" * 30000 + '"a"' + ")" * 30000}, "too deeply nested"),
]


@pytest.mark.parametrize(("args", "words"), REFUSED)
def test_what_cannot_be_meant_is_refused_within_a_second(
    context: ProcessorContext, args: dict[str, Any], words: str
) -> None:
    """Of processor time: most take a millisecond, and what else the machine does is not theirs."""
    began = time.process_time()
    with pytest.raises(ValueError, match=re.escape(words)):
        one(context, **args)
    assert time.process_time() - began < 1.0


MANY = " | ".join(f'"y{i}z" "q"' for i in range(2500))


@pytest.mark.parametrize(
    "args",
    [
        {"grammar": f'start: "aaa" x\nx: {MANY}'},
        {"grammar": f"start: {MANY}"},
        {"json": {"anyOf": [{"type": "object", "required": [f"k{i}"]} for i in range(2500)]}},
        {
            "json": {
                "type": "object",
                "required": ["a"],
                "properties": {"a": {"enum": [{"x": i} for i in range(2500)]}},
            }
        },
    ],
)
def test_too_many_ways_to_go_on_are_found_when_compiling(context: ProcessorContext, args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="more than 2,000 ways to go on"):
        one(context, **args)


def test_a_limit_that_one_answer_meets_is_its_requests_fault(context: ProcessorContext, tokenizer: Tokenizer) -> None:
    grammar = f'start: "a" | "b" x | "c"\nx: {MANY}'
    assert spell(one(context, grammar=grammar), tokenizer, "c")
    processor = one(context, grammar=grammar)
    (b,) = tokenizer.encode("b", add_special_tokens=False)
    with pytest.raises(RequestError, match=r"in the middle of an answer: more than 2,000 .* fewer alternatives"):
        processor.accept(b)
        processor.mask()
    with pytest.raises(RuntimeError, match="satisfy"):
        one(context, regex="a").accept(b)


def name(i: int) -> str:
    return "start" if i == 0 else "r" + np.base_repr(i, 36).lower()


def deepest() -> list[dict[str, Any]]:
    """The deepest chains that fit into the sizes that are allowed."""
    found: list[dict[str, Any]] = []
    for body in ("{next}", '"x" {next}?', "{next} {next}"):
        rules: list[str] = []
        used = 0
        while used < (64 << 10) - 60:
            rules.append(f"{name(len(rules))}:" + body.format(next=name(len(rules) + 1)))
            used += len(rules[-1]) + 1
        found.append({"grammar": "\n".join([*rules, f'{name(len(rules))}:"y"'])})
    for inner in ('{"$ref":"#/$defs/%s"}', '{"items":{"$ref":"#/$defs/%s"}}', '{"allOf":[{"$ref":"#/$defs/%s"}]}'):
        defs: list[str] = []
        used = 0
        while used < (512 << 10) - 200:
            n = np.base_repr(len(defs) + 1, 36)
            defs.append(f'"{np.base_repr(len(defs), 36)}":' + inner % n)
            used += len(defs[-1]) + 4
        last = np.base_repr(len(defs), 36)
        found.append({"json": '{"$ref":"#/$defs/0","$defs":{' + ",".join([*defs, f'"{last}":true']) + "}}"})
    found += [{"regex": "a?" * 4000 + "a" * 8000}, {"regex": "(a|b)(c|d)" * 1600}, {"regex": "x*" * 8000}]
    found += [{"regex": "(a{1000}){1000}"}, {"grammar": 'start: "a"{100000}'}]
    found += [{"choice": [f"w{i}" for i in range(9000)]}, {"json": {"type": "string", "minLength": 1_000_000}}]
    return found


def test_the_most_that_is_allowed_harms_nobody(context: ProcessorContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled or refused, but in time; masks of what was compiled work on a thread with an ordinary stack."""
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", PATIENCE)
    for args in deepest():
        began, computed = time.monotonic(), time.thread_time()
        processor: Guided | None = None
        with suppress(ValueError):
            processor = one(context, **args)
        assert time.thread_time() - computed < 1.2, "beside what it waits for, which is COMPILE_SECONDS at most"
        assert time.monotonic() - began < 20.0
        if processor is None:
            continue

        def step(processor: Guided = processor) -> None:
            try:
                for _ in range(3):
                    processor.accept(allowed(processor)[0])
                    if processor.finished():
                        break
            except RuntimeError:
                pass  # a limit of one step

        thread = threading.Thread(target=step)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()


def test_grammars_are_kept_by_their_text_and_the_oldest_go(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "KEPT", 2)
    context = ProcessorContext(VOCAB, (EOS,), cache(lambda: tokenizer))
    compiled: list[str] = []
    real = compiler.compiled

    def counted(text: str, tokens: Any) -> Any:
        compiled.append(text)
        return real(text, tokens)

    monkeypatch.setattr(compiler, "compiled", counted)
    for regex in ("a", "b", "a", "c", "a", "b"):
        one(context, regex=regex)
    assert len(compiled) == 4


@pytest.mark.parametrize(("cheap_seconds", "times"), [(10.0, 3), (0.0, 1)])
def test_only_what_takes_long_to_compile_is_shared(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, cheap_seconds: float, times: int
) -> None:
    """Copies of one matcher share its lexer, and wait for each other."""
    monkeypatch.setattr(compiler, "CHEAP_SECONDS", cheap_seconds)
    made: list[str] = []
    real = compiler.compiled_again
    monkeypatch.setattr(compiler, "compiled_again", lambda text, tokens: made.append(text) or real(text, tokens))
    context = ProcessorContext(VOCAB, (EOS,), cache(lambda: tokenizer))
    a, b, c = (one(context, regex="ab") for _ in range(3))
    assert len(made) == times
    a.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert spell(b, tokenizer, "ab") and spell(c, tokenizer, "ab")


def test_who_takes_too_long_to_compile_is_refused_and_holds_up_nobody(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def patience(seconds: float) -> None:
        monkeypatch.setattr(compiler, "COMPILE_SECONDS", seconds)
        monkeypatch.setattr(compiler, "PATIENCE_SECONDS", seconds)

    context = ProcessorContext(VOCAB, (EOS,), cache(lambda: tokenizer))
    patience(60)
    one(context, regex="z")
    hang, real = threading.Event(), compiler.compiled
    monkeypatch.setattr(
        compiler, "compiled", lambda text, tokens: hang.wait(60) if "slow" in text else real(text, tokens)
    )
    for i in range(compiler.MOST_COMPILING):
        patience(0.1)
        with pytest.raises(ValueError, match=r"longer than 0\.1 s"):
            one(context, regex=f"slow{i}")
        if i == 0:
            patience(60)
            one(context, regex="quick")
    patience(0.1)
    with pytest.raises(RequestError, match="too many other grammars") as refused:
        one(context, regex="quick2")
    assert (refused.value.code, refused.value.status) == ("server_overloaded", 503)
    patience(60)
    one(context, regex="z")
    hang.set()


def test_what_others_take_of_the_processor_is_not_the_grammars(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sleeps, or waits for a busy machine, compiles nothing meanwhile; who compiles on and on is given up."""
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.3)
    context = ProcessorContext(VOCAB, (EOS,), cache(lambda: tokenizer))
    over, real = threading.Event(), compiler.compiled

    def late(text: str, tokens: Any) -> Any:
        while "endless" in text and not over.is_set():
            pass
        time.sleep(0.6)
        return real(text, tokens)

    monkeypatch.setattr(compiler, "compiled", late)
    assert spell(one(context, regex="ab"), tokenizer, "ab")
    with pytest.raises(ValueError, match=r"longer than 0\.3 s"):
        one(context, regex="endless")
    over.set()


AT_EXIT = """
import time
from llmcore_guided import compiler
from llmcore_guided.compiler import _within

compiler.PATIENCE_SECONDS = 0.0

def work():
    time.sleep(0.5)
    print("compiled", flush=True)

print(_within(0.01, work))
"""


def test_python_waits_at_its_exit_for_what_was_given_up() -> None:
    """Or it would end the thread within the library, which is a crash."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "it takes longer than 0.01 s to compile\ncompiled\n"
