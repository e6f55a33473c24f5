"""plugin-guided: a grammar is compiled in time or refused, and who is late holds up nobody."""

from __future__ import annotations

import os
import signal
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
from llguidance.gbnf_to_lark import RuleRefNode, gbnf_to_lark
from llmcore.api import ProcessorContext, RequestError, Tokenizer
from llmcore_devtools.tokenizer import EOS
from llmcore_guided import compiler, limits, processor
from llmcore_guided.gbnf import as_lark
from llmcore_guided.processor import Guided
from llmcore_guided.trials import Answer, Question, Trials, Words

pytestmark = pytest.mark.usefixtures("patient")

PATIENCE = limits.COMPILE_SECONDS

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
    monkeypatch.setattr(limits, "COMPILE_SECONDS", PATIENCE)
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


def test_grammars_are_kept_by_their_arguments_and_the_oldest_go(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "KEPT", 2)
    context = ProcessorContext(VOCAB, (EOS,), cache(lambda: tokenizer))
    asked: list[str] = []
    real = Trials.answer

    def counted(trials: Trials, question: Question) -> Answer:
        asked.append(question.args)
        return real(trials, question)

    monkeypatch.setattr(Trials, "answer", counted)
    for regex in ("a", "b", "a", "c", "a", "b"):
        one(context, regex=regex)
    assert len(asked) == 4


@pytest.mark.parametrize(("cheap_seconds", "times"), [(10.0, 3), (0.0, 1)])
def test_only_what_takes_long_to_compile_is_shared(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, cheap_seconds: float, times: int
) -> None:
    """Copies of one matcher share its lexer, and wait for each other."""
    monkeypatch.setattr(compiler, "CHEAP_SECONDS", cheap_seconds)
    made: list[str] = []
    real = compiler.compiled_again
    monkeypatch.setattr(compiler, "compiled_again", lambda *given: made.append(given[0]) or real(*given))
    context = ProcessorContext(VOCAB, (EOS,), cache(lambda: tokenizer))
    a, b, c = (one(context, regex="ab") for _ in range(3))
    assert len(made) == times
    a.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert spell(b, tokenizer, "ab") and spell(c, tokenizer, "ab")


SLOW: dict[str, Any] = {
    "grammar": "start: A\n" + "\n".join(f"A{i or ''}: A{i + 1} A{i + 1}" for i in range(30)) + '\nA30: "a"'
}
"""It takes some 0.3 s to find out that it is too large."""


def test_what_takes_longer_than_its_time_ends_with_its_process_and_others_go_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ProcessorContext(VOCAB, (EOS,), cache(lambda: tokenizer))
    one(context, regex="a")
    with monkeypatch.context() as patch:
        patch.setattr(limits, "COMPILE_SECONDS", 0.02)
        for _ in range(3):
            with pytest.raises(ValueError, match=r"^it takes longer than 0\.02 s to compile$"):
                one(context, **SLOW)
    with pytest.raises(ValueError, match="too complex to compile"):
        one(context, **SLOW)
    assert spell(one(context, regex="ab"), tokenizer, "ab")


def test_a_process_that_does_not_answer_is_killed_and_the_server_is_busy(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ProcessorContext(VOCAB, (EOS,), cache(lambda: tokenizer))
    one(context, regex="a")
    (process,) = trials_of(context)._pool._idle
    process._process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process._process.pid, os.WSTOPPED)  # a signal may arrive after the call that sends it
    monkeypatch.setattr(limits, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(RequestError, match="too busy to compile it; send the request again") as refused:
        one(context, regex="b")
    assert (refused.value.code, refused.value.status) == ("server_overloaded", 503)
    assert process._process.returncode == -signal.SIGKILL and not trials_of(context)._pool._idle


def test_a_process_that_was_killed_meanwhile_is_replaced(tokenizer: Tokenizer) -> None:
    context = ProcessorContext(VOCAB, (EOS,), cache(lambda: tokenizer))
    one(context, regex="a")
    (process,) = trials_of(context)._pool._idle
    process._process.kill()
    process._process.wait()
    assert spell(one(context, regex="b"), tokenizer, "b")
    assert trials_of(context)._pool._idle != [process]


def test_processes_end_with_what_asked_them(tokenizer: Tokenizer) -> None:
    trials = Trials(Words(300, (257,), {}))
    trials.warm()
    (process,) = trials._pool._idle
    del trials
    assert process._process.wait(20) is not None


UNDER_A_LIMIT = """
import resource
from llmcore_guided.trials import Trials, Words

resource.setrlimit(resource.RLIMIT_AS, (1500 << 20, 1500 << 20))
Trials(Words(300, (257,), {})).warm()
print("started")
"""


def test_processes_start_under_the_operators_own_limit_of_memory() -> None:
    done = subprocess.run([sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "started\n")


def trials_of(context: ProcessorContext) -> Trials:
    return processor._models[context.tokenizer].trials


@pytest.mark.parametrize("backwards", [False, True])
def test_a_chain_of_rules_in_gbnf_is_translated_as_the_library_does_it(
    monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    """But not by looking at all of its rules for each of them, which takes a second for this one."""
    rules = [f'r{i} ::= "a" r{i + 1} | loop' for i in range(100)]
    more = ["root ::= r0", *(reversed(rules) if backwards else rules), 'r100 ::= [b-c]+ "d"', 'loop ::= "e" loop?']
    text = "\n".join(more)
    assert as_lark(text).split() == gbnf_to_lark(text).split()
    looks: list[str] = []
    real = RuleRefNode.is_terminal
    monkeypatch.setattr(RuleRefNode, "is_terminal", lambda ref: looks.append(ref.name) or real(ref))
    as_lark("\n".join([*more[:1], *(rule.removesuffix(" | loop") for rule in more[1:-1])]))
    assert len(looks) < 300


AT_EXIT = """
import time
from llmcore_guided import compiler

def work():
    time.sleep(0.5)
    print("compiled", flush=True)

import threading
threading.Thread(target=lambda: compiler._deep(work), daemon=True).start()
time.sleep(0.1)
"""


def test_python_waits_at_its_exit_for_what_is_compiled() -> None:
    """Or it would end the thread within the library, which is a crash."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "compiled\n")
