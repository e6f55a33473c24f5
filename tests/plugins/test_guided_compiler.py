"""plugin-guided: a grammar is compiled in time or refused, and who is late holds up nobody."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest
from guided_answers import VOCAB, allowed, one, spell
from llmcore.api import ProcessorContext, RequestError, Tokenizer
from llmcore.testing.tokenizer import EOS
from llmcore_guided import compiler
from llmcore_guided.processor import Guided

pytestmark = pytest.mark.usefixtures("patient")

PATIENCE = compiler.COMPILE_SECONDS

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
