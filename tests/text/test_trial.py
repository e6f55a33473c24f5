"""A model's chat templates are tried in a child before anybody is served with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmcore.errors import ConfigError
from llmcore.text import trial


def given(directory: Path, template: str) -> Path:
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ raise_exception('no users here') }}",
        "{{ messages[0].no.such.thing }}",
    ],
)
def test_good_and_picky_ones_pass(tmp_path: Path, template: str) -> None:
    trial.try_templates(given(tmp_path, template))


def test_none_passes(tmp_path: Path) -> None:
    trial.try_templates(tmp_path)


# row 41
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.__class__.__init__.__globals__ }}", "unsafe"),
        ("{{ (''|attr('__class' ~ '__')).__name__ }}", "cannot be served"),
        ("{% for i in range(10**9) %}x{% endfor %}", "[Rr]ange"),
        ("{{ 'x' * 10**10 }}", "memory"),
        ("{{ 'x' * 10**7 }}", "10,000,000 characters"),
        # within one call, where nothing in Python could stop it, and in less memory than it may have
        ("{{ 10 ** (10 ** 8) }}", "does not end"),
        ("{% if %}", "cannot be compiled"),
    ],
)
def test_hostile_ones_end_the_start(tmp_path: Path, template: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        trial.try_templates(given(tmp_path, template))
    assert "trust" in str(refused.value)
