"""`llmcore bench throughput`: the time to answer a whole workload."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from llmcore.cli.options import Resolved, SettingsCommand

from llmcore_devtools.bench.stats import Spread
from llmcore_devtools.bench.workloads import parse_workload
from llmcore_devtools.cli.bench.common import GROUPS, document, engine_options, started, write_json

if TYPE_CHECKING:
    from llmcore_devtools.bench.engine_runs import Run

_COLUMNS = "{:<20}  {:>22}  {:>10}  {:>14}  {:>12}  {:>7}  {:>11}"


@click.command(cls=SettingsCommand, groups=GROUPS)
@click.argument("model", required=False)
@click.option(
    "--workload",
    multiple=True,
    default=("chat:1000",),
    show_default=True,
    help="chat:N, a mix of lengths as in conversations, or fixed:N,PROMPT,ANSWER; again for more.",
)
@engine_options
def command(
    resolved: Resolved, model: str | None, workload: tuple[str, ...], json_file: Path | None, **options: Any
) -> None:
    """Time whole workloads, submitted at once, in this process.

    MODEL is a directory or a GGUF file, as in --model_dir; with --load_format dummy its config.json is enough. Figures
    are the median of the runs, with the lowest and the highest. Prompts are random and new in every run, answers
    never end early, the prefix cache is off.
    """
    wanted = [parse_workload(text) for text in workload]
    results = []
    with started(resolved, model, options) as engine:
        from llmcore_devtools.bench.engine_runs import measure_throughput

        click.echo(
            _COLUMNS.format("workload", "seconds", "requests/s", "in+out tok/s", "out tok/s", "steps", "preemptions")
        )
        for one in wanted:
            runs = measure_throughput(engine, one, repeats=options["repeats"], warmup=options["warmup"])
            found = as_json(one.name, runs)
            results.append(found)
            click.echo(
                _COLUMNS.format(
                    one.name,
                    str(Spread.of([run.seconds for run in runs])),
                    f"{found['requests_per_s']:,.1f}",
                    f"{found['tokens_per_s']:,.0f}",
                    f"{found['output_tokens_per_s']:,.0f}",
                    max(run.steps for run in runs),
                    max(run.preemptions for run in runs),
                )
            )
        write_json(json_file, document("bench throughput", engine, {**options, "workload": workload}, results))


def as_json(name: str, runs: list[Run]) -> dict[str, Any]:
    """Rates from the median time, and every run in seconds."""
    seconds = Spread.of([run.seconds for run in runs])
    run = runs[0]
    return {
        "workload": name,
        "seconds": asdict(seconds),
        "requests_per_s": run.requests / seconds.median,
        "tokens_per_s": (run.prompt_tokens + run.output_tokens) / seconds.median,
        "output_tokens_per_s": run.output_tokens / seconds.median,
        "runs": [asdict(run) for run in runs],
    }
