"""`llmcore bench latency`: the times of a decode step and of a first token, by batch size."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from llmcore.cli.options import Resolved, SettingsCommand

from llmcore_devtools.cli.bench.common import GROUPS, document, engine_options, names, started, write_json

if TYPE_CHECKING:
    from llmcore_devtools.bench.engine_runs import Latency

BATCHES = (1, 8, 32, 64, 128, 256)
_COLUMNS = "{:>6}  {:>24}  {:>24}  {:>24}  {:>24}"


@click.command(cls=SettingsCommand, groups=GROUPS)
@click.argument("model", required=False)
@click.option("--batch", type=click.IntRange(min=1), multiple=True, default=BATCHES, help="Requests at once; again.")
@click.option(*names("input_len"), type=click.IntRange(min=1), default=512, show_default=True, help="Prompt tokens.")
@click.option(*names("output_len"), type=click.IntRange(min=2), default=129, show_default=True, help="Answer tokens.")
@engine_options
def command(
    resolved: Resolved, model: str | None, batch: tuple[int, ...], json_file: Path | None, **options: Any
) -> None:
    """Time decode steps and first tokens, by batch size, in this process.

    MODEL is a directory or a GGUF file, as in --model_dir; with --load_format dummy its config.json is enough. A step
    is (T(whole answers) - T(one token)) / (tokens - 1). Figures are the median of the runs, with the lowest and the
    highest. Prompts are random and new in every run, answers never end early, the prefix cache is off.
    """
    results = []
    with started(resolved, model, options) as engine:
        from llmcore_devtools.bench.engine_runs import measure_latency

        click.echo(_COLUMNS.format("batch", "whole answers, s", "one token, s", "decode step, ms", "first token, ms"))
        length = options["input_len"] + options["output_len"]
        for size in batch:
            if reason := engine.fits(size, length):
                click.echo(f"{size:>6}  does not fit at once: {reason}")
                results.append({"batch": size, "skipped": reason})
                continue
            found = measure_latency(
                engine,
                size,
                options["input_len"],
                options["output_len"],
                repeats=options["repeats"],
                warmup=options["warmup"],
            )
            whole, one = found.times
            click.echo(_COLUMNS.format(size, *map(str, (whole, one, *_milliseconds(found)))))
            results.append(as_json(found))
        write_json(json_file, document("bench latency", engine, options, results))


def as_json(found: Latency) -> dict[str, Any]:
    """The figures in milliseconds, and every run in seconds."""
    step, first = _milliseconds(found)
    return {
        "batch": found.batch,
        "input_len": found.input_len,
        "output_len": found.output_len,
        "decode_step_ms": asdict(step),
        "first_token_ms": asdict(first),
        "runs": [asdict(run) for run in found.whole],
        "runs_of_one_token": [asdict(run) for run in found.one],
    }


def _milliseconds(found: Latency) -> tuple[Any, Any]:
    return found.step.scaled(1e3), found.first_token.scaled(1e3)
