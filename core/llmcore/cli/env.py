"""`llmcore env`: versions, devices and plugins, for a bug report."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from llmcore import __version__
from llmcore.api.errors import reraise_if_stopping, text_of
from llmcore.api.specs import DeviceSpec
from llmcore.cli.options import named_plugins
from llmcore.config import environment
from llmcore.registry.loader import collect, load
from llmcore.registry.registry import Registry

DEPENDENCIES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "msgspec",
    "orjson",
    "pyzmq",
    "falcon",
    "waitress",
    "pluggy",
    "click",
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Describe this machine, for a bug report."""
    facts = describe(collect(named_plugins()))
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for title, rows in facts.items():
        click.echo(f"{title}:")
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            click.echo(f"  {name:<{width}}  {value}")


def describe(registry: Registry) -> dict[str, dict[str, Any]]:
    """The output of `llmcore env`, by heading. Values of variables are left out, because they may be secret."""
    return {
        "llmcore": {"version": __version__, "variables set": ", ".join(sorted(environment())) or "none"},
        "machine": {
            "python": f"{platform.python_version()} ({sys.executable})",
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
            "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        },
        "packages": {name: _version(name) for name in DEPENDENCIES},
        "devices": {spec.name: _device(spec) for spec, _ in registry.specs(DeviceSpec)},
        "plugins": {
            info.name: f"{info.dist} {info.version}" for info in registry.plugins if info.dist != "llmcore-engine"
        },
        "failures": {f"{failure.plugin.dist}:{failure.plugin.name}": str(failure) for failure in registry.failures},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _device(spec: DeviceSpec) -> str:
    try:
        reason: str | None = load(spec.available)()
    except BaseException as error:  # noqa: BLE001 - the error of a plugin's probe is shown
        reraise_if_stopping(error)
        return f"failed: {text_of(error)}"
    return f"not available: {reason}" if reason else "available"
