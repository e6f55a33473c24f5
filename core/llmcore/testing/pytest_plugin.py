"""Fixtures that pytest finds by itself where llmcore is installed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmcore.registry import Registry


@pytest.fixture
def llmcore_registry() -> Callable[..., Registry]:
    """`llmcore_registry("my-plugin", "./mine.py")` is the registry of those plugins and the built-ins.

    Names are what `--plugins` takes; a plugin that fails raises PluginError.
    """
    from llmcore.testing import registry_of

    return registry_of
