"""The facades that plugins import: every name that they list exists, and it is the one of its room."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from llmcore import api
from llmcore.api import specs
from llmcore.config import Config


@pytest.mark.parametrize("facade", ["", ".text", ".sched", ".cli", ".engine"])
def test_every_listed_name_exists(facade: str) -> None:
    module = importlib.import_module(f"llmcore.api{facade}")
    assert module.__all__ and all(hasattr(module, name) for name in module.__all__)


def test_names_are_those_of_the_rooms() -> None:
    assert api.Config is Config and api.KernelSpec is specs.KernelSpec
    assert set(dir(api)) == set(api.__all__)


def test_a_name_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Absent'"):
        _ = api.Absent  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", ["llmcore.config", "llmcore.weights.map", "llmcore.api.hookspecs", "llmcore.api"])
def test_any_module_may_be_imported_first(first: str) -> None:
    """The settings need contracts of the api, and the api shows the settings."""
    program = f"import {first}\nfrom llmcore.api import *\nassert Config().section and hookimpl and WeightMap"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
