"""Row 41: chat templates that behave until a word comes: then a 400 within the limits, and others are served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llmcore.api.errors import RequestError
from llmcore.text.templates import ChatTemplate
from llmcore_server import templates
from llmcore_server.templates import ChildTemplate

CPU_SECONDS = 0.4
"""In place of the second that a render may take: the same attacks in less time."""

BIG = "{% set s = 'x' * (big // 250) %}"
DEEP = "{% set ns = namespace(a=[1, 2]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"

# `big` is a variable, because Jinja computes what has constants only when it compiles a template.
TIME = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a filter of a loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "filters": "{% for i in range(99999) %}{% set x = range(99999) | map('string') | join %}{% endfor %}",
    "power": "{{ 9 ** big }}",
    "numbers that grow": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "round": "{{ 5 | round(big, 'ceil') }}",
    "compare": DEEP + "{% set b = ns.a %}" + DEEP + "{{ b == ns.a }}",
    "hash": (
        "{% set ns = namespace(a=(1, 2)) %}{% for i in range(40) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
        "{{ {ns.a: 1} | length }}"
    ),
    "find among numbers": "{% for i in range(99999) %}{{ 1.5 in range(99999) }}{% endfor %}",
    "longer lists": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + [n] %}{% endfor %}",
    "output without end": "{% for i in range(99999) %}{% for j in range(99999) %}{% if j < 0 %}x{% endif %}"
    "{% endfor %}{% endfor %}",
}
MEMORY = {
    "text times a number": "{{ 'x' * big }}",
    "a number times a list": "{{ (big * [1]) | length }}",
    "doubled text": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "set blocks": "{% set a %}{{ s }}{% endset %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40,
    "a macro's output": "{% macro m() %}{% for i in range(9999) %}{{ s ~ i }}{% endfor %}{% endmacro %}{{ m() }}",
    "a long output": "{% for i in range(9999) %}{{ s ~ i }}{% endfor %}",
    "padding": "{{ '%*d' % (big, 1) }}",
    "precision": "{{ '%.*f' % (big, 1.5) }}",
    "format": "{{ '{:>{w}}'.format(1, w=big) }}",
    "center": "{{ 'x' | center(big) }}",
    "ljust": "{{ 'x'.ljust(big) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(big) }}",
    "replace": "{{ s.replace('x', s) | length }}",
    "join": "{{ s.join(['a'] * 9999) | length }}",
    "batch": "{{ [1] | batch(big, 0) | list | length }}",
    "bytes of a number": "{{ (1).to_bytes(big, 'big') | length }}",
    "arguments": "{% macro m() %}{{ m(*varargs) }}{% endmacro %}{{ m(*range(99999)) }}",
}
ANY = {
    "deep text": DEEP + "{{ ns.a }}",
    "deep JSON": DEEP + "{{ ns.a | tojson }}",
    "sort": "{{ (['b' ~ s, 'a'] * 1500000) | sort | length }}",
    "generators in generators": (
        "{% set ns = namespace(a=[1]) %}{% for i in range(90000) %}{% set ns.a = ns.a | map('string') %}{% endfor %}"
        "{{ ns.a | list }}"
    ),
}
"""The CPU seconds or the memory end first, or the stack."""

ATTACKS = {**TIME, **MEMORY, **ANY}
SAID = "{% set said = messages[-1].content %}"
CASES = "".join(f"{{% if said == {word!r} %}}{BIG}{text}{{% endif %}}" for word, text in ATTACKS.items())


@pytest.fixture(scope="module")
def template() -> Iterator[ChildTemplate]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "CPU_SECONDS", CPU_SECONDS)
        yield ChildTemplate(ChatTemplate({"default": SAID + CASES + "{{ said }}"}))


STOPPED = "the model's chat template was stopped: for these messages it takes more than "


def attacked(template: ChildTemplate, word: str) -> str:
    """The reason why there is no prompt. Others are served before and after it."""
    for said in ("Hello", word, "Hello again"):
        try:
            assert template.render([{"role": "user", "content": said}], big=999_999_999) == said != word
        except RequestError as error:
            assert (said, error.status, error.param) == (word, 400, "messages")
            reason = error.message
    return reason


@pytest.mark.parametrize("word", TIME)
def test_attacks_on_time(template: ChildTemplate, word: str) -> None:
    assert attacked(template, word).startswith(f"{STOPPED}0.4 s of CPU time")


@pytest.mark.parametrize("word", MEMORY)
def test_attacks_on_memory(template: ChildTemplate, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "CPU_SECONDS", 60.0)  # memory ends first on a slow machine too
    assert attacked(template, word).startswith(f"{STOPPED}64 MB of memory")


@pytest.mark.parametrize("word", ANY)
def test_attacks_on_more_than_one_thing(template: ChildTemplate, word: str) -> None:
    reason = attacked(template, word)
    assert reason.startswith(STOPPED) or "maximum recursion depth exceeded" in reason
