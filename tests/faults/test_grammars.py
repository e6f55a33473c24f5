"""Rows 36 to 39: what clients want answers to fit, when it is hostile, endless, or fits nothing."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import MakeHouse
from harness import House, allowed, expected

REFUSED_SECONDS = 1.0
"""On an idle machine. Compiling is given up after 0.8 s of a processor, or 5 s of a busy one."""
SCHEMAS = 300
"""More than the plugin keeps."""


@pytest.fixture(scope="module")
def module_house(make_house: MakeHouse) -> Iterator[House]:
    with make_house(plugins=["guided"]) as house:
        compiled(house, guided_regex="[ab]{4}")
        house.settle()
        yield house


def ask(house: House, **more: Any) -> tuple[int, Any, float]:
    """Status, body and seconds of a completion."""
    request = house.request("/v1/completions", {"prompt": "x", "max_tokens": 20, "temperature": 0, **more})
    began = time.monotonic()
    status, _, answer = house.send(request)
    return status, json.loads(answer), time.monotonic() - began


def ask_on(house: House, **more: Any) -> tuple[int, Any]:
    """As `ask`, and again where a busy machine took too long to compile what takes a moment."""
    for _ in range(20):
        status, answer, _ = ask(house, **more)
        if status != 400 or not re.search("to compile|are being compiled", answer["error"]["message"]):
            break
    return status, answer


def compiled(house: House, **more: Any) -> Any:
    """The body of an answer whose grammar is a fine one."""
    status, answer = ask_on(house, **more)
    assert status == 200, answer
    return answer


def fits(house: House) -> None:
    """Grammars are compiled as before."""
    for regex in (f"[ab]{{{time.monotonic_ns() % 7 + 2}}}", "yes|no"):
        answer = compiled(house, guided_regex=regex)
        assert re.fullmatch(regex, answer["choices"][0]["text"]), answer


REGEXES = {
    "nested": "(a+)+b",
    "counted": "a{1,99999}",
    "counted twice": "(a{1,999}){1,999}b",
    "doubled": "foo**",
    "lookbehind": "(?<=a)b",
    "lookahead": "(?=a)b",
    "back-reference": r"(a)\1",
    "open": "(",
    "a megabyte": "a" * (1 << 20),
    "many choices": "|".join(f"x{i}y" for i in range(4000)) * 2,
    "deep": "(" * 3000 + "a" + ")" * 3000,
    "empty class": "[z-a]",
}

FINE = {"nested", "counted", "counted twice", "doubled", "many choices"}
"""They compile at once where the compiler is an automaton's; then the answer fits them."""


@pytest.mark.parametrize("name", REGEXES)
def test_row_36_regular_expressions(house: House, name: str) -> None:
    with house.neighbour(gap=allowed(0.5)):
        status, answer, seconds = ask(house, guided_regex=REGEXES[name])
    assert status == 400 or (status == 200 and name in FINE), answer
    assert seconds < allowed(REFUSED_SECONDS)
    if status == 400:
        assert answer["error"]["param"] == "guided_regex"
        assert len(answer["error"]["message"]) < 600
    fits(house)


def test_row_36_a_limit_in_the_middle_of_an_answer(house: House) -> None:
    """Which no compiler foresees: the client's fault, and said so."""
    many = " | ".join(f'"y{i}z" "q"' for i in range(2500))
    (b,) = json.loads(house.post("/tokenize", {"prompt": "b", "add_special_tokens": False})[2])["tokens"]
    grammar = {"guided_grammar": f'start: "a" | "b" x | "c"\nx: {many}', "logit_bias": {str(b): 100}}
    with house.neighbour(gap=allowed(0.5)):
        status, answer = ask_on(house, **grammar)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "guided_grammar", "invalid_value")
    assert "fewer alternatives" in answer["error"]["message"]
    fits(house)


def deep(n: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


RECURSIVE = {
    "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
    "$ref": "#/$defs/n",
}

SCHEMES: dict[str, tuple[Any, set[int]]] = {
    "itself": ({"$ref": "#"}, {400}),
    "endless": (RECURSIVE, {200, 400}),
    "deep": (deep(300), {200, 400}),
    "deeper": ('{"items":' * 10_000 + "{}" + "}" * 10_000, {400}),
    "many values": ({"enum": [f"value {i}" for i in range(20_000)]}, {200, 400}),
    "remote": ({"$ref": "http://127.0.0.1:9/schema.json"}, {400}),
    "a file": ({"$ref": "file:///etc/passwd"}, {400}),
    "bad pattern": ({"type": "string", "pattern": "("}, {400}),
    "unknown type": ({"type": "x"}, {400}),
    "nothing": ({"enum": []}, {400}),
    "anything": ({}, {200}),
    "no schema": ("[", {400}),
    "a list": ("[]", {400}),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_row_37_schemas(house: House, name: str) -> None:
    schema, statuses = SCHEMES[name]
    with house.neighbour(gap=allowed(0.5)):
        status, answer, seconds = ask(house, guided_json=schema)
    assert status in statuses, answer
    assert seconds < allowed(REFUSED_SECONDS if status == 400 else 2.0)
    assert "/etc/passwd" not in json.dumps(answer) or name == "a file"
    fits(house)


def test_row_38_recursive_grammars(house: House) -> None:
    for grammar in ("start: start", "start: a\na: b\nb: a", 'root ::= root "a"', "start: a", "%%"):
        status, answer, seconds = ask(house, guided_grammar=grammar)
        assert status == 400 and seconds < allowed(REFUSED_SECONDS), (grammar, answer)
    status, answer, _ = ask(house, guided_grammar='root ::= root "a" | "b"')
    assert status in (200, 400), answer
    fits(house)


def test_row_38_many_schemas(house: House, request: pytest.FixtureRequest) -> None:
    """As many as one likes, each new: what is kept of them is bounded."""
    schemas: int = request.config.getoption("--schemas", 2 * SCHEMAS)

    def one(i: int) -> None:
        schema = {"type": "object", "properties": {f"name_{i}": {"type": "integer"}}, "required": [f"name_{i}"]}
        compiled(house, guided_json=schema, max_tokens=1)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(one, range(SCHEMAS)))) == SCHEMAS
        before = house.resident()
        assert len(list(pool.map(one, range(SCHEMAS, schemas)))) == schemas - SCHEMAS
    grown = (house.resident() - before) >> 20
    print(f"{schemas} schemas: {grown:+d} MiB since {SCHEMAS}, of {before >> 20}")
    assert grown < 48


def test_row_39_what_allows_no_token(house: House) -> None:
    """Only the tokens that the grammar does not want are allowed: the request ends, and nobody else does."""
    with house.neighbour():
        for more in (
            {"logits_processors": [{"name": "fault", "args": {"at": "mask", "how": "none"}}]},
            {"logits_processors": [{"name": "fault", "args": {"at": "mask", "how": "none", "after": 3}}]},
        ):
            status, answer, _ = ask(house, **more)
            assert status == 500 and answer["error"]["type"] == "server_error", answer
        assert house.text([3, 3], 20) == expected([3, 3], 20)
    fits(house)


def chained(number: int) -> str:
    """A grammar of 1,900 rules that was never seen before."""
    return "\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i + 1}' for i in range(1900)), f'r1900 ::= "{number}"'])


def test_row_38_grammars_without_end_keep_nobody_waiting(house: House) -> None:
    """Five clients send one after the other; small expressions are compiled all the same, and streams go on."""
    over, numbers = threading.Event(), itertools.count()
    statuses: list[int] = []

    def attack() -> None:
        while not over.is_set():
            statuses.append(ask(house, guided_grammar=chained(next(numbers)), max_tokens=2)[0])

    with ThreadPoolExecutor(5) as pool, house.neighbour(gap=allowed(0.5)):
        attacks = [pool.submit(attack) for _ in range(5)]
        try:
            for i in range(8):
                answer = compiled(house, guided_regex=f"[ab]{{{i + 1}}}x", max_tokens=20)
                assert re.fullmatch(f"[ab]{{{i + 1}}}x", answer["choices"][0]["text"]), answer
        finally:
            over.set()
        for done in attacks:
            done.result()
    assert set(statuses) <= {200, 503}
    fits(house)
