"""Row 41: chat templates that behave until a word comes: then a 400 within the limits, and the process lives.

Run as a program, this file tries all attacks and prints a line of JSON for each: what the renderer said, the CPU time,
and the growth of the process's peak memory.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import pytest
from llmcore.api.errors import RequestError
from llmcore.text import render_budget
from llmcore.text.templates import ChatTemplate

WORD = "sesame"
BIG = "{% set s = 'x' * 4000000 %}"
DEEP = "{% set ns = namespace(a=[1, 2]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"

SECONDS = 0.2
"""Of CPU time, in place of the second that a render may take: the same attacks in less time."""
SLACK_SECONDS = 1.0
"""What a slow machine may need for the one operation that a render ends with."""
MEGABYTES = 64


ATTACKS = {
    # time
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a filter of a loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loop over text": "{% for i in range(9999) %}{% for c in 'x' * 900000 %}{% endfor %}{% endfor %}",
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "deep recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "select": "{% for i in range(99999) %}{% set x = range(99999) | select('none') | list %}{% endfor %}",
    "map": "{% for i in range(99999) %}{% set x = range(99999) | map('string') | join %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "numbers that grow": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "round up": "{{ 5 | round(999999999, 'ceil') }}",
    "round down": "{{ 5 | round(-999999999) }}",
    "slow search": "{% set a = 'a' * 400000 %}{{ (a ~ a).rfind(a ~ 'b' ~ a) }}",
    "slow strip": "{% set a = 'a' * 2000000 %}{{ a.strip('b' * 2000000) }}",
    "sort of long texts": BIG + "{{ ([s] * 90000) | sort | length }}",
    "sort of many": "{{ (['b', 'a'] * 1500000) | sort | length }}",
    "sort of one text": BIG + "{{ range(90000) | map(attribute='x', default=s) | sort | length }}",
    "unique of one text": BIG + "{{ ([s] * 90000) | unique | list | length }}",
    "find among long texts": BIG + "{{ (s[1:] ~ 'y') in [s] * 90000 }}",
    "compare": DEEP + "{% set b = ns.a %}" + DEEP + "{{ b == ns.a }}",
    "hash": (
        "{% set ns = namespace(a=(1, 2)) %}{% for i in range(40) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
        "{{ {ns.a: 1} | length }}"
    ),
    "hash of a depth": (
        "{% set ns = namespace(a=(1,)) %}{% for i in range(99999) %}{% set ns.a = (ns.a,) %}{% endfor %}"
        "{{ ns.a in {} }}"
    ),
    "generators in generators": (
        "{% set ns = namespace(a=[1]) %}{% for i in range(90000) %}{% set ns.a = ns.a | map('string') %}{% endfor %}"
        "{{ ns.a | list }}"
    ),
    "hash by a test": (
        "{% set ns = namespace(a=(1, 2)) %}{% for i in range(40) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
        "{{ ns.a is filter }}{{ messages | map(ns.a) | list }}"
    ),
    "hash by JSON": (
        "{% set ns = namespace(a=(1, 2)) %}{% for i in range(40) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
        "{{ 1 | tojson(separators=ns.a) }}"
    ),
    "numbers among numbers": "{% for i in range(99999) %}{{ 1.5 in range(99999) }}{% endfor %}",
    "many attributes": "{{ range(90000) | sort(attribute='a,' * 9000) | length }}",
    "attributes of attributes": "{{ range(90000) | map(attribute='a.' * 90000) | list | length }}",
    "fields of fields": "{{ ('{0' ~ '.a' * 3000000 ~ '}').format(1) }}",
    "links": "{{ ('http://a.b/' ~ '(' * 3000000) | urlize }}",
    "tags without end": "{{ ('<!--' * 500000) | striptags }}",
    # memory
    "text times a number": "{{ 'x' * 10 ** 10 }}",
    "a number times a list": "{{ (10 ** 10 * [1]) | length }}",
    "doubled text": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled text by ~": "{% set n = namespace(x='ab') %}{% for i in [1] * 60 %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "sets in a row": "{% set a = 'ab' * 999 %}" + "{% set a = a ~ a %}" * 40,
    "set blocks": "{% set a %}{{ 'ab' * 999 }}{% endset %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40,
    "a list of texts": (
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + ['x' * 10000 ~ i] %}{% endfor %}"
    ),
    "lists of lists": (
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, [i] * 1000] %}{% endfor %}"
    ),
    "lists that hold older ones": (
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = ns.x + [ns.x] %}{% endfor %}"
    ),
    "texts on the way": "{{ [" + BIG.partition("= ")[2].partition(" %")[0] + ", 'y' * 4000000" * 60 + "] | length }}",
    "a macro's output": "{% macro m() %}{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}{% endmacro %}{{ m() }}",
    "generators": (
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + [[i] | map('abs')] %}{% endfor %}"
    ),
    "lists of numbers": (
        "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + [range(9999) | list] %}{% endfor %}"
    ),
    "namespaces": (
        "{% set n = namespace(x=0) %}{% for i in range(99999) %}{% set n.x = namespace(x=n.x) %}{% endfor %}{{ n.x }}"
    ),
    "arguments": "{% macro m() %}{{ m(*varargs) }}{% endmacro %}{{ m(*range(99999)) }}",
    "what a loop remembers": (
        "{% for i in range(2) %}" * 15 + "{% if loop.changed('x' * 9000000 ~ i) %}{% endif %}" + "{% endfor %}" * 15
    ),
    "small output": (
        "{% macro m() %}{% for i in range(99999) %}{% for j in range(99) %}{{ i }}{% endfor %}{% endfor %}"
        "{% endmacro %}{{ m() }}"
    ),
    "output without end": "{% for i in range(99999) %}" + "{{ 'x' * 99999 }}{% endfor %}",
    "short output without end": "{% for i in range(99999) %}{% for j in range(99999) %}ab{% endfor %}{% endfor %}",
    "wide output": BIG + "{{ s }}{{ s }}{{ s }}\N{GRINNING FACE}{{ s }}{{ s }}",
    "macros that close over texts": (
        "{% for i in range(9999) %}{% set s = 'x' * 99999 ~ i %}{% macro m() %}{{ m }}{{ s }}{% endmacro %}"
        "{% endfor %}"
    ),
    "padding by %": "{{ '%999999999d' % 1 }}",
    "padding by a star": "{{ '%*d' % (999999999, 1) }}",
    "precision": "{{ '%.999999999f' % 1.5 }}",
    "many fields": BIG + "{{ ('%(a)s' * 9999) % {'a': s} }}",
    "odd": "{{ '%999999999d' is odd }}",
    "divisible": "{{ '%999999999d' is divisibleby(3) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format by a field": "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "format_map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "fields": BIG + "{{ ('{0}' * 9999).format(s) }}",
    "the filter format": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'x' | center(999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(999999999) }}",
    "replace": BIG + "{{ s.replace('x', s) | length }}",
    "replace nothing": BIG + "{{ s | replace('', 'abcdefghijklmnopqrst') | length }}",
    "join": BIG + "{{ s.join(['a'] * 9999) | length }}",
    "the filter join": BIG + "{{ range(9999) | join(s) | length }}",
    "split": BIG + "{{ s.split('x') | length }}",
    "split at spaces": "{{ ('ab ' * 4000000).split() | length }}",
    "characters": "{{ ('\N{GREEK SMALL LETTER ALPHA}' * 4000000) | list | length }}",
    "indent": "{{ ('\n' * 9999) | indent(99999) | length }}",
    "indent of JSON": "{{ [[[1]]] | tojson(indent=99999999) }}",
    "deep JSON": DEEP + "{{ ns.a | tojson }}",
    "JSON of one text": BIG + "{{ range(90000) | map(attribute='x', default=s) | list | tojson }}",
    "control characters": "{{ ('\x01' * 12000000) | tojson }}",
    "deep JSON on lines": DEEP + "{{ ns.a | tojson(indent=2) }}",
    "deep text": DEEP + "{{ ns.a }}",
    "deep namespace": (
        "{% set ns = namespace(a=namespace()) %}{% for i in range(40) %}"
        "{% set ns.a = namespace(a=ns.a, b=ns.a) %}{% endfor %}{{ ns.a }}"
    ),
    "a deep name": DEEP + "{{ {}[ns.a].x }}",
    "a deep attribute": DEEP + "{{ 1 | attr(ns.a) }}",
    "deep and safe": DEEP + "{{ ns.a | safe }}",
    "deep query": DEEP + "{{ {'a': ns.a} | urlencode }}",
    "deep arguments": "{% macro m(n) %}{% if n > 40 %}{{ varargs }}{% endif %}{{ m(n + 1, varargs, varargs) }}"
    "{% endmacro %}{{ m(0, 1) }}",
    "batch": "{{ [1] | batch(999999999, 0) | list | length }}",
    "slice": "{{ [1] | slice(999999999) | list | length }}",
    "sum of lists": "{{ ([[1] * 9999] * 9999) | sum(start=[]) | length }}",
    "wrapped": BIG + "{{ ('x ' * 9999) | wordwrap(1, true, s) }}",
    "escapes": "{{ ('<' * 3000000) | e | e | e | e | length }}",
    "case": "{{ 'x'.translate({120: 'y' * 999}) }}",
    "bytes of a number": "{{ (1).to_bytes(999999999, 'big') | length }}",
    "a long refusal": BIG + "{{ raise_exception(s) }}",
    # Python's insides
    "a way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a way out by format": "{{ '{0.__class__}'.format(1) + 1 }}",
    "a way out by attr": "{{ ('' | attr('__class' ~ '__')).__name__ + 1 }}",
    "change a message": "{{ dict.update(messages[0], content='x') }}",
    "clear": "{{ messages.clear() }}",
    # long templates, which take memory to compile
    "a long body": "{% for i in range(99999) %}" + "{% if messages.x %}{% endif %}" * 20_000 + "{% endfor %}",
    "a long macro": (
        "{% macro m(n) %}" + "{% if messages.x %}{% endif %}" * 20_000 + "{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}"
        "{% endif %}{% endmacro %}{{ m(99) }}"
    ),
    "a long filter": ("{% for i in range(99999) if " + " ~ ".join(["messages.x"] * 20_000) + " %}{% endfor %}"),
}


def template(attack: str) -> str:
    said = "{{ messages[-1].content }}"
    return "{% if '" + WORD + "' in messages[-1].content %}" + ATTACKS[attack] + "{% endif %}" + said


def tried(attack: str) -> dict[str, object]:
    """What becomes of one attack; `said` is None if nothing stopped it."""
    made = ChatTemplate({"default": template(attack)}, {})
    assert made.render([{"role": "user", "content": "Hello"}]) == "Hello"
    before, began, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time(), None
    try:
        made.render([{"role": "user", "content": f"open {WORD}"}])
    except RequestError as error:
        said = error.message
        assert (error.status, error.param) == (400, "messages")
    cpu = time.thread_time() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"attack": attack, "said": said, "cpu": cpu, "grown_mb": grown / 1024}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """All attacks, one after another in one process."""
    command = [sys.executable, __file__, str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    return {line["attack"]: line for line in lines}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_a_refusal(results: dict[str, dict[str, Any]], attack: str) -> None:
    result = results[attack]
    assert result["said"], "nothing stopped it"
    assert "template" in result["said"] or attack == "a long refusal"
    assert len(result["said"]) < 1500
    assert result["cpu"] < SECONDS + SLACK_SECONDS


def test_the_process_does_not_grow(results: dict[str, dict[str, Any]]) -> None:
    """The peak only ever rises, so all of its steps together are how far above the first the highest was."""
    grown = {attack: result["grown_mb"] for attack, result in results.items()}
    assert sum(grown.values()) < MEGABYTES, sorted(grown.items(), key=lambda pair: -pair[1])[:5]


def main(seconds: float) -> None:
    limit = 3 << 30  # of address space: an attack that succeeds ends here and not with the machine
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    render_budget.CPU_SECONDS = seconds
    for attack in ATTACKS:
        print(json.dumps(tried(attack)), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
