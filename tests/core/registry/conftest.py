"""A folder on sys.path with plugins that a test installs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from llmcore.registry import loader
from sites import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder on sys.path that distributions can be installed into; nothing else is installed or built in."""
    monkeypatch.setattr(loader, "BUILTINS", {})
    monkeypatch.setattr(loader, "distributions", lambda: distributions(path=[str(tmp_path)]))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Site(tmp_path)
    for name in [m for m in sys.modules if m.startswith(("dist_", "llmcore_file_"))]:
        del sys.modules[name]
