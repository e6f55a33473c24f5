"""Fixtures that pytest finds by itself if llmcore-devtools is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from llmcore.registry.registry import Registry

if TYPE_CHECKING:
    from llmcore_devtools.server import RunningServer


@pytest.fixture
def llmcore_registry() -> Callable[..., Registry]:
    """`llmcore_registry("my-plugin", "./mine.py")` is the registry of those plugins and the built-ins.

    Names are values of `--plugins`. A plugin that fails raises PluginError.
    """
    from llmcore_devtools import registry_of

    return registry_of


@pytest.fixture
def llmcore_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """`llmcore_server(plugins=("./mine.py",))` starts a real server of the fake model and returns it.

    Settings are those of `llmcore serve`; `model_dir` takes another model. `faults`: requests may cause the faults of
    `llmcore_devtools.faults`. The server listens on a free port of 127.0.0.1 and ends with the test.
    """
    from llmcore_devtools.server import serving

    with ExitStack() as servers:

        def start(model_dir: Path | None = None, *, faults: bool = False, **settings: Any) -> RunningServer:
            if model_dir is None:
                from llmcore_devtools.fake_files import write_fake_model

                model_dir = write_fake_model(tmp_path / "fake-model", all_faults=faults)
            return servers.enter_context(serving(model_dir, faults=faults, **settings))

        yield start
