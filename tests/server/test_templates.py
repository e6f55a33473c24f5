"""Chat templates in child processes: what they render, what stops them, and what a server does not start with."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llmcore.api import child_pool
from llmcore.api.errors import ConfigError, RequestError
from llmcore.text.source import Templated
from llmcore.text.templates import ChatTemplate
from llmcore.text.tokenizer import load_tokenizer
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server import templates
from llmcore_server.templates import ChildTemplate, render_in_children

USER = [{"role": "user", "content": "Héllo"}]
MODELS = "the model's chat template"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ON_A_WORD = "{% if 'sesame' in messages[0].content %}" + LOOP + "{% endif %}{{ messages[0].content }}"
SESAME = [{"role": "user", "content": "open sesame"}]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "CPU_SECONDS", 0.3)


def child(source: str, **more: Any) -> ChildTemplate:
    return ChildTemplate(ChatTemplate({"default": source}, {"bos_token": "<s>"}, **more))


def test_a_child_renders_as_this_process_does() -> None:
    source = (
        "{{ bos_token }}{{ messages | tojson }}{{ tools | tojson }}{{ frame.a }}{{ x }}{{ add_generation_prompt }}"
    )
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"}, constants={"frame": {"a": "é"}})
    rendered = ChildTemplate(template)
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = ({"large": 10**30, "small": -(10**30), "half": 0.5, "none": None, "text": "\x00\n\N{GRINNING FACE}"},)
    for given in ({"tools": tools}, {"tools": tools, "x": [True], "add_generation_prompt": False, "frame": 1}):
        assert rendered.render(messages, **given) == template.render(messages, **given)


def test_errors_are_the_templates() -> None:
    template = child("{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].no.such }}")
    for given, message in (({"tools": [1]}, "no tools"), ({}, "'dict object' has no attribute 'no'")):
        with pytest.raises(RequestError, match=f"{message}$") as caught:
            template.render(USER, **given)
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", "invalid_value")
    with pytest.raises(RequestError, match=r"^$"):
        child("{{ raise_exception('') }}").render(USER)


def test_a_long_conversation_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four megabytes of text. One wide character makes each text four times as large."""
    monkeypatch.setattr(templates, "CPU_SECONDS", 60.0)
    source = (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + m.content %}{% endfor %}"
        "{% for m in messages %}{{ m.content | upper | trim | replace('A', 'b') }}{% endfor %}{{ ns.s }}"
    )
    messages = [{"role": "user", "content": f"{i} \N{GRINNING FACE} banana " * 1000} for i in range(200)]
    template = ChatTemplate({"default": source})
    assert ChildTemplate(template).render(messages) == template.render(messages)


@pytest.mark.parametrize("origin", ["", "--chat_template"])
def test_a_render_without_end_is_stopped(origin: str) -> None:
    template = child(ON_A_WORD, origin=origin)
    with pytest.raises(RequestError) as caught:
        template.render(SESAME)
    assert caught.value.message == (
        f"{origin or MODELS} was stopped: for these messages it takes more than 0.3 s of CPU time; send fewer or "
        "shorter ones, and if that changes nothing, give the server another one with --chat_template"
    )
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", "invalid_value")
    assert template.render(USER) == "Héllo"


@pytest.fixture
def occupied(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ChildTemplate, list[threading.Thread]]]:
    """A template with one place, which a render without end has, and the threads that render it."""
    monkeypatch.setattr(templates, "PLACES", 1)
    monkeypatch.setattr(templates, "MOST_WAITING", 1)
    monkeypatch.setattr(templates, "CPU_SECONDS", 2.0)
    template = child(ON_A_WORD)
    template.warm()
    threads: list[threading.Thread] = []

    def attack() -> None:
        with pytest.raises(RequestError):
            template.render(SESAME)

    threads.append(threading.Thread(target=attack))
    threads[0].start()
    while template._places._value:
        time.sleep(0.001)
    yield template, threads
    for thread in threads:
        thread.join()


def test_only_few_renders_wait_for_others(occupied: tuple[ChildTemplate, list[threading.Thread]]) -> None:
    template, threads = occupied
    found: list[str] = []
    threads.append(threading.Thread(target=lambda: found.append(template.render(USER))))
    threads[-1].start()
    while template._waiting._value:
        time.sleep(0.001)
    with pytest.raises(RequestError, match="takes long for these messages, and for those of other requests") as caught:
        template.render(USER)
    assert (caught.value.status, caught.value.code) == (503, "server_overloaded")
    assert not found
    threads[-1].join()
    assert found == ["Héllo"]


def test_a_render_that_waits_too_long_is_refused(
    occupied: tuple[ChildTemplate, list[threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "WALL_SECONDS", 0.01)
    with pytest.raises(RequestError, match="try again later"):
        occupied[0].render(USER)


def test_without_children_the_server_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_pool, "START_SECONDS", 0.0)
    with pytest.raises(RequestError, match="try again later") as caught:
        child("x").render(USER)
    assert caught.value.status == 503


# --- tokenizers


def test_a_tokenizer_with_a_template_gets_a_child(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").write_text("{{ messages[0].content }}{{ thinking }}")
    inner = load_tokenizer(tmp_path)
    chosen = Templated(inner, ChatTemplate({"default": "{{ messages[0].content }}!"}, origin="--chat_template"))
    for tokenizer, prompt, variables in ((chosen, "Héllo!", {"messages"}), (inner, "Héllo", {"messages", "thinking"})):
        render_in_children(tokenizer)
        assert isinstance(tokenizer.template, ChildTemplate)
        assert (tokenizer.chat(USER), tokenizer.template.variables) == (prompt, variables)


class Own:
    """A tokenizer of a plugin, with a way of its own to write conversations."""

    def chat(self, messages: Any, /, **variables: Any) -> str:
        return "own"


def test_other_tokenizers_stay_as_they_are(tmp_path: Path) -> None:
    without: Any = load_tokenizer(write_tokenizer(tmp_path))
    if without.template.sources:
        without.template = ChatTemplate({})
    template = without.template
    render_in_children(Own())
    render_in_children(without)
    assert without.template is template
    with pytest.raises(RequestError, match="no chat template"):
        without.chat(USER)


# --- before anybody is served


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content }}", "{{ raise_exception('no users here') }}", "{{ messages[0].no.such.thing }}"],
)
def test_good_and_picky_ones_pass(source: str) -> None:
    child(source).check()


def test_none_passes() -> None:
    ChildTemplate(ChatTemplate({})).check()


# row 41
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__' .* unsafe"),
        ("{{ messages.__class__.__init__.__globals__ }}", "unsafe"),
        ("{{ (''|attr('__class' ~ '__')).__name__ }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ 'x' * 10**10 }}", "for one word it takes more than 64 MB of memory"),
        ("{{ 'x' * 2 * 10**6 }}", "2,000,000 characters"),
        # Within one call, where no code of Python's could stop it.
        ("{{ 10 ** (10 ** 8) }}", r"for one word it takes more than 0\.3 s of CPU time"),
        (LOOP, r"for one word it takes more than 0\.3 s of CPU time"),
        ("{% if %}", "cannot be compiled"),
    ],
)
def test_hostile_ones_end_the_start(source: str, why: str) -> None:
    for template in (ChatTemplate({"default": source}), ChatTemplate({"default": "x", "tool_use": source})):
        with pytest.raises(ConfigError, match=f"^the model's chat template .*{why}"):
            ChildTemplate(template).check()
    with pytest.raises(ConfigError, match=f"^--chat_template.*{why}.*; correct "):
        child(source, origin="--chat_template").check()


def test_only_the_templates_own_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the child's imports take longer than templates may."""
    burn = "import time\nwhile time.process_time() < 1.2: pass\n"
    (tmp_path / "sitecustomize.py").write_text(burn)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(templates, "CPU_SECONDS", 1.0)
    child("{{ messages[0].content }}").check()


def test_a_child_that_cannot_start_is_not_the_templates_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError, match=r"could not start: it was ended by SIGKILL; check the limits") as refused:
        child("x").check()
    assert "trust" not in str(refused.value)


def test_a_machine_that_is_too_busy_is_not_the_templates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "CPU_SECONDS", 5.0)
    monkeypatch.setattr(templates, "WALL_SECONDS", 0.1)
    with pytest.raises(
        ConfigError, match=r"did not end within 0\.1 s; start the server when the machine is less busy"
    ):
        child(LOOP).check()


def test_a_child_is_small() -> None:
    template = child("{{ messages[0].content }}")
    assert template.render(USER) == "Héllo"
    (process,) = (kept._process.pid for kept in template._pool._idle)
    loaded = Path(f"/proc/{process}/maps").read_text()
    assert not any(name in loaded for name in ("numpy", "torch", "tokenizers", "transformers"))
