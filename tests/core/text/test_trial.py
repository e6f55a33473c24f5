"""A model's chat templates are tried in a child before anybody is served with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llmcore.api.errors import ConfigError
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
        ("{{ 'x' * 2 * 10**6 }}", "2,000,000 characters"),
        # within one call, where nothing in Python could stop it
        ("{{ 10 ** (10 ** 8) }}", "more than 8192 bits"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1 s of CPU time"),
        ("{% if %}", "cannot be compiled"),
    ],
)
def test_hostile_ones_end_the_start(tmp_path: Path, template: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        trial.try_templates(given(tmp_path, template))
    assert "trust" in str(refused.value)


def test_only_the_template_s_own_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the child's imports take longer than templates may."""
    burn = "import time\nwhile time.process_time() < 1.2: pass\n"
    (tmp_path / "sitecustomize.py").write_text(burn)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(trial, "CPU_SECONDS", 1)
    model = tmp_path / "model"
    model.mkdir()
    trial.try_templates(given(model, "{{ messages[0].content }}"))


def test_a_child_that_cannot_start_is_no_fault_of_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError, match=r"could not start: it was ended by SIGKILL; check the limits") as refused:
        trial.try_templates(given(tmp_path, "{{ messages[0].content }}"))
    assert "trust" not in str(refused.value)


def test_a_limit_that_is_lower_already_stays() -> None:
    code = (
        "import resource; from llmcore.text import trial; resource.setrlimit(resource.RLIMIT_CPU, (50, 60)); "
        "trial._limit(resource.RLIMIT_CPU, 55); print(resource.getrlimit(resource.RLIMIT_CPU)); "
        "trial._limit(resource.RLIMIT_CPU, 45); print(resource.getrlimit(resource.RLIMIT_CPU))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["(50, 60)", "(45, 60)"]
