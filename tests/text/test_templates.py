from __future__ import annotations

from typing import Any

import pytest
from llmcore.errors import ConfigError, RequestError
from llmcore.text import render_budget, templates
from llmcore.text.templates import ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' "
    "+ message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt "
    "%}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Héllo"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **variables)


def test_smollm2() -> None:
    assert render(SMOLLM2) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHéllo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(SMOLLM2, [{"role": "system", "content": "S"}, *USER], add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHéllo<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Héllo</s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Héllo"}]'),
        ("{{ messages[0] | tojson(indent=2) }}", '{\n  "role": "user",\n  "content": "Héllo"\n}'),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ tools is defined }}", "False"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
    ],
)
def test_what_templates_expect(source: str, text: str) -> None:
    assert render(source, tools=None) == text


def test_a_refusal_carries_the_templates_message() -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert (caught.value.message, caught.value.param) == ("roles must alternate", "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[3].content }}",
        "{{ messages.append(1) }}",
        "{{ range(10**9) | list }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ '%c' % 55296 }}",  # half of a character, which no tokenizer takes
        "{% include 'other' %}",
    ],
)
def test_an_error_in_a_template_is_the_requests(source: str) -> None:
    with pytest.raises(RequestError, match="cannot render"):
        render(source)


def test_a_broken_template_is_a_startup_error() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        render("{% if %}")


def test_without_a_template_chat_is_refused() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate({}, {}).render(USER)


def test_tool_templates_are_picked_by_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }}"}, {})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[]) == "plain"
    assert template.render(USER, tools=[{}, {}]) == "2"


@pytest.mark.parametrize(("arguments", "shown"), [('{"a": "é"}', '{"a": "é"}'), ("{broken", '"{broken"'), ("", "{}")])
def test_arguments_become_objects(arguments: str, shown: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", [message]) == shown
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}|", "|"),
        ("{{ messages[0].content is none }}", "True"),
        ("{% if messages[0]['content'] is not none %}answer{% endif %}", ""),
        # One that asks and then cannot work with it.
        ("{% if messages[0].content is none or true %}{{ messages[0].content | length }}{% endif %}", "0"),
        ("{{ messages[0].tool_calls[0].function.arguments | tojson }}", '{"a": 1}'),
        ("{{ 'text: ' + messages[0].tool_calls[0].function.arguments }}", 'text: {"a": 1}'),
        ("{{ messages[0].tool_calls | map(attribute='function.name') | tojson }}", '["f"]'),
    ],
)
def test_calls_come_as_the_template_wants_them(source: str, text: str) -> None:
    assert render(source, [CALLED]) == text


def test_the_first_failure_is_told() -> None:
    with pytest.raises(RequestError, match=r"has no attribute .nothing"):
        render("{{ messages[0].content + messages[0].nothing.at_all }}", [CALLED])


@pytest.mark.parametrize(
    ("template", "sent", "why"),
    [
        ("{% for m in messages %}{{ messages | tojson }}{% endfor %}", ["x" * 1000] * 1000, "1,048,576 characters"),
        ("{% for m in messages %}{% for n in messages[1:] %}{% endfor %}{% endfor %}", [""] * 20_000, "CPU time"),
        (
            "{% for m in messages %}{{ messages | selectattr('role', 'eq', 'x') | list }}{% endfor %}",
            [""] * 9000,
            "CPU",
        ),
    ],
)
def test_a_prompt_without_end_is_given_up(
    template: str, sent: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_budget, "CPU_SECONDS", 0.1)
    monkeypatch.setattr(templates, "MAX_CHARACTERS", 1 << 20)
    rendered = ChatTemplate({"default": template}, {})
    messages = [{"role": "user", "content": text} for text in sent]
    with pytest.raises(RequestError, match="the model's chat template") as caught:
        rendered.render(messages)
    assert caught.value.param == "messages"
    assert why in caught.value.message
    assert len(rendered.render(messages[:3])) < 10_000


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "9" * 10_000 + " }}",
        "{% autoescape true %}{% endautoescape %}",
        "{% macro m() %}{% block b %}{% endblock %}{% endmacro %}",
        "{{ 1 | no_such_filter }}",
    ],
)
def test_no_text_is_a_traceback(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template cannot be compiled") as caught:
        ChatTemplate({"default": source}, {})
    assert len(str(caught.value)) < 1500


LONG = [
    # What outlives its turn of a loop is in a namespace; what it replaces there is gone.
    "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + m.content %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[]) %}{% for m in messages %}{% set ns.s = ns.s + [m] %}{% endfor %}{{ ns.s | length }}",
    "{% for m in messages %}{{ m.content | upper | trim | replace('A', 'b') }}{{ m | tojson }}{% endfor %}",
    "{% macro m(x) %}{{ x.content | upper }}{% endmacro %}{% for x in messages %}{{ m(x) | lower }}{% endfor %}",
    "{% for m in messages %}{% set a = m.content.split('a') %}{{ a | join('b') | indent(2) }}{% endfor %}",
    "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all }}",
]


@pytest.mark.parametrize("source", LONG)
def test_a_long_conversation_stays_far_below_the_limits(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four megabytes of text come in, and gigabytes are made on the way."""
    monkeypatch.setattr(render_budget, "CPU_SECONDS", 60.0)
    monkeypatch.setattr(render_budget, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(render_budget, "PER_INPUT_BYTE", 6)
    messages = [{"role": "user", "content": f"{i} banana Köln " * 60} for i in range(4000)]
    assert render(source, messages)
