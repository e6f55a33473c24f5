"""Shared code of the benchmarks: options, the start of an engine, and the JSON document."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from llmcore.api.specs import OptionSpec
from llmcore.cli.display import Stages
from llmcore.cli.options import Resolved, with_model
from llmcore.config import plugin_settings, settings, value_of, with_model_resolved

from llmcore_devtools.bench.machine import machine, versions

if TYPE_CHECKING:
    from llmcore_devtools.bench.engine_runs import BenchEngine

F = TypeVar("F", bound=Callable[..., Any])

GROUPS = ("model", "memory", "scheduling", "kernels", "plugins", "plugin_options")
"""The settings of a benchmark in this process: all except the server's."""


def names(name: str) -> tuple[str, ...]:
    """An option's spellings, with _ and with -."""
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def _writable(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value is None:
        return None
    if not Path(value).resolve().parent.is_dir():
        raise click.BadParameter(f"{value}: there is no such directory.", ctx, parameter)
    return Path(value)


def file_option(name: str, help: str) -> Callable[[F], F]:
    """An option for a file to write. Its folder is checked before the benchmark starts."""
    return click.option(
        f"--{name}", f"{name}_file", type=click.Path(dir_okay=False, writable=True), callback=_writable, help=help
    )


def engine_options(function: F) -> F:
    """The common options of both benchmarks in this process."""
    options = (
        click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs that count."),
        click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Runs before them."),
        click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0, the default: greedy."),
        click.option(*names("top_p"), type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Nucleus."),
        click.option(*names("top_k"), type=click.IntRange(min=0), default=0, help="The k likeliest (0: all)."),
        click.option(*names("prefix_cache"), is_flag=True, help="Leave the prefix cache on; prompts never hit it."),
        file_option("json", "Write machine, versions, settings and every run to this file."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@contextmanager
def started(resolved: Resolved, model: str | None, options: Mapping[str, Any]) -> Iterator[BenchEngine]:
    """The engine of the settings; prints how it started and what fits."""
    config = with_model_resolved(with_model(resolved.config, model))
    stages = Stages()
    try:
        from llmcore.api.bridge import SamplingParams

        from llmcore_devtools.bench.engine_runs import BenchEngine

        sampling = SamplingParams(**{name: options[name] for name in ("temperature", "top_p", "top_k")})
        engine = BenchEngine(config, prefix_cache=options["prefix_cache"], sampling=sampling, progress=stages.update)
    finally:
        stages.close()
    with engine:
        here = machine()
        rows = [
            *engine.facts.report,
            ("ready", f"{engine.ready:.1f} s to build, {engine.since_start:.1f} s since the process began"),
            ("machine", f"{here['cpu']}, {here['cores']} cores"),
            ("versions", ", ".join(f"{name} {text}" for name, text in versions(engine.registry).items())),
        ]
        for label, text in rows:
            click.echo(f"{label}: {text}")
        click.echo("")
        yield engine


def document(command: str, engine: BenchEngine, options: Mapping[str, Any], results: list[Any]) -> dict[str, Any]:
    """The figures, and everything that they depend on."""
    brought = plugin_settings(spec for spec, _ in engine.registry.specs(OptionSpec))
    offered = [setting for setting in settings() if setting.group in GROUPS]
    offered += [setting for setting in brought if not setting.serving]
    return {
        **described(command, options),
        "versions": versions(engine.registry),
        "settings": {setting.name: value_of(engine.config, setting) for setting in offered},
        "start": {"ready_s": engine.ready, "since_process_start_s": engine.since_start},
        "engine": dict(engine.facts.report),
        "kv_tokens": engine.facts.kv_tokens,
        "results": results,
    }


def described(command: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The beginning of every document."""
    return {
        "command": command,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine(),
        "versions": versions(),
        "options": dict(options),
    }


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON, unless `path` is None."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n")
