"""A plugin that `replicated.observed` adds to a config: a file of each process has what ranks have alike."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcore.api import LayerInfo, OptionSpec, hookimpl, option, options_of
from llmcore.config import Config

if TYPE_CHECKING:
    from llmcore_devtools.bench.replicated import Ledger


@dataclass(frozen=True, kw_only=True)
class Observer:
    """The option of the observer."""

    observed_into: str = option("", "Folder for a file of each process, named by its id.")


_KEPT: dict[str, Any] = {}
"""The folder and the ledger of this process's model."""


@hookimpl
def register_options() -> Iterable[OptionSpec]:
    """`observed_into`."""
    return options_of(Observer)


@hookimpl
def on_startup(config: Config) -> None:
    """Begin a ledger."""
    from llmcore_devtools.bench.replicated import Ledger

    _KEPT.update(folder=config.section(Observer).observed_into, ledger=Ledger())


@hookimpl
def build_layer(layer: Any, info: LayerInfo) -> Any:
    """The layer with a ledger beside it."""
    from llmcore_devtools.bench.replicated import observe

    return observe(layer, info, _KEPT["ledger"])


@hookimpl
def on_shutdown() -> None:
    """Write the ledger, once."""
    ledger: Ledger | None = _KEPT.pop("ledger", None)
    if ledger is not None:
        ledger.save(Path(_KEPT["folder"]) / f"{os.getpid()}.npz")
