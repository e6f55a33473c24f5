from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from llmcore.config import Config
from llmcore_server.child import MAX_WORDS
from llmcore_server.messages import EngineLaunch, LastWords
from llmcore_server.supervisor.child import Child

ENDS = """
import os
from llmcore_server import child
from llmcore.api.errors import ConfigError
from llmcore_server.messages import EngineLaunch

launch = child.begin(EngineLaunch)
error = {error}
if error is not None:
    child.report_failure(launch, error)
os._exit(3)
"""
"""A child that puts nothing away and sends nothing before it ends."""


@contextmanager
def ended(folder: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> Iterator[Child]:
    (folder / "ends.py").write_text(ENDS.format(error=error))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    launch = EngineLaunch(
        name="engine-0",
        parent=os.getpid(),
        log=str(folder / "log"),
        control="ipc:///nowhere",
        config=Config(),
        report_seconds=1.0,
    )
    child = Child("ends", launch)
    assert child.wait(60) and child.ending == "ended with exit code 3"
    yield child
    child.close()


def type_of(error: str) -> str:
    return error.partition("(")[0]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ConfigError('mend --this')", LastWords("mend --this", usage=True)),
        ("ValueError('a bug')", LastWords("ValueError: a bug")),
        ("ValueError(chr(0xD800) * 20_000)", LastWords(("ValueError: " + "?" * MAX_WORDS)[:MAX_WORDS])),
        ("None", None),
    ],
)
def test_what_a_child_said_last_is_there_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, words: LastWords | None
) -> None:
    with ended(tmp_path, monkeypatch, error) as child, ended(tmp_path, monkeypatch, error) as later:
        assert child.last_words == words
        assert 0 < child.spoke < later.spoke if words is not None else child.spoke == 0
    if words is not None:
        assert type_of(error) in (tmp_path / "log").read_text().splitlines()[-1]
