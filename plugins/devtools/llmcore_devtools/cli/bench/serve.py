"""`llmcore bench serve`: latency and throughput that clients of a server see, at given rates of arrival."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from llmcore.api.errors import ConfigError, LlmcoreError
from llmcore.cli.openai_client import Server

from llmcore_devtools.bench.client import DIALECTS, Target
from llmcore_devtools.bench.load import METRICS, figures, offer, parse_objectives, payloads, raw
from llmcore_devtools.bench.stats import QUANTILES
from llmcore_devtools.bench.svg import Panel, chart
from llmcore_devtools.bench.workloads import Workload, fixed, parse_workload, read_lengths
from llmcore_devtools.cli.bench.common import described, file_option, names, write_json

DEFAULT_REQUESTS = 1000
_NAMES = {"ttft": "first token", "tpot": "per token", "gap": "longest gap", "itl": "between", "e2e": "whole"}


def rate_of(text: str | float) -> float:
    """Requests per second, or inf."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise click.BadParameter(f"{text!r} is no rate; write requests per second, or inf for all at once.")
    return rate


@dataclass(frozen=True)
class Plan:
    """The parameters that all rates share."""

    target: Target
    model: str
    workload: Workload
    objectives: Mapping[str, float]
    vocab_size: int
    seconds: float
    seed: int


@click.command("serve", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", required=True, help="The server: http://127.0.0.1:8000.")
@click.option("--dialect", type=click.Choice(list(DIALECTS)), default="openai-completions", show_default=True)
@click.option("--model", help="Name in requests (default: the first one the server lists).")
@click.option(
    *names("request_rate"),
    type=rate_of,
    multiple=True,
    default=(math.inf,),
    help="Requests per second, or inf, the default; again for a curve.",
)
@click.option("--workload", help="chat:N, or fixed:N,PROMPT,ANSWER (default: chat:1000).")
@click.option("--lengths", type=click.Path(path_type=Path), help="Draw lengths from a CSV file: prompt,output.")
@click.option(*names("num_requests"), type=click.IntRange(min=1), help="Requests per rate (default: the workload's).")
@click.option(
    *names("max_seconds"),
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Per rate; what is open then is given up.",
)
@click.option(
    "--slo", multiple=True, help="Objective for goodput, in ms: ttft=500, tpot=50, gap=100, e2e=9000; again for more."
)
@click.option(
    *names("vocab_size"),
    type=click.IntRange(min=2),
    default=32000,
    show_default=True,
    help="Prompts hold ids below this.",
)
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Requests before all others.")
@click.option("--seed", type=int, default=7, show_default=True, help="Of arrivals, and of the draw from --lengths.")
@file_option("json", "Write machine, options, figures and every answer's times to this file.")
@file_option("plot", "Write the curve of latency over throughput to this file, as SVG.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    url: str,
    dialect: str,
    model: str | None,
    request_rate: tuple[float, ...],
    json_file: Path | None,
    plot_file: Path | None,
    **options: Any,
) -> None:
    """Load a server over HTTP at given rates.

    Requests leave as a Poisson process, whether earlier ones were answered or not; answers are streamed. Prompts are
    random token ids, new in every run (openai-chat: about as many random words). Exit code 1 if a request failed.
    """
    target = Target(url, DIALECTS[dialect])
    if model is None:
        model = "" if dialect == "lightllm" else Server(url, None).model
    plan = Plan(
        target=target,
        model=model,
        workload=_workload(options),
        objectives=parse_objectives(options["slo"]),
        vocab_size=options["vocab_size"],
        seconds=options["max_seconds"],
        seed=options["seed"],
    )
    _warm_up(plan, options["warmup"])
    results, every = [], []
    for rate in request_rate:
        found, answers = run(plan, rate)
        _show(found)
        results.append(found)
        every.append(answers)
    if plot_file is not None:
        plot_file.write_text(chart(f"{plan.workload.name} at {url}", curve(results)), encoding="utf-8")
    rates = ["inf" if math.isinf(rate) else rate for rate in request_rate]
    asked = {**options, "url": url, "dialect": dialect, "model": model, "request_rate": rates}
    asked["lengths"] = None if options["lengths"] is None else str(options["lengths"])
    write_json(json_file, {**described("bench serve", asked), "results": results, "answers": every})
    ctx.exit(1 if any(found["failed"] for found in results) else 0)


def run(plan: Plan, rate: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One rate: its figures, and every answer."""
    lengths = plan.workload.lengths
    requests = payloads(plan.target, lengths, plan.vocab_size, plan.model)
    window = offer(plan.target, requests, lengths, rate, seconds=plan.seconds, seed=plan.seed)
    return figures(window, plan.objectives), raw(window)


def curve(results: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """TTFT and TPOT over the tokens per second that were answered, one point per rate."""
    panels = []
    for name, label in (("ttft_ms", "time to first token, ms"), ("tpot_ms", "time per further token, ms")):
        lines = {
            quantile: sorted(
                (found["output_tokens_per_s"], max(found[name][quantile], 1e-3)) for found in results if found[name]
            )
            for quantile in ("p50", "p90", "p99")
        }
        panels.append(Panel("output tokens per second", label, lines))
    return panels


def _workload(options: Mapping[str, Any]) -> Workload:
    given, lengths, n = options["workload"], options["lengths"], options["num_requests"]
    if lengths is not None:
        if given is not None:
            raise ConfigError("--workload and --lengths both say what is asked for; give one of them.")
        return read_lengths(lengths, n or DEFAULT_REQUESTS, options["seed"])
    workload = parse_workload(given or f"chat:{n or DEFAULT_REQUESTS}")
    return workload.cut(n) if n else workload


def _warm_up(plan: Plan, n: int) -> None:
    """Send `n` short requests, one after the other. The first failure ends the benchmark with its reason."""
    for lengths in fixed(n, 16, 4).lengths if n else ():
        requests = payloads(plan.target, [lengths], plan.vocab_size, plan.model)
        window = offer(plan.target, requests, [lengths], math.inf, seconds=plan.seconds, seed=plan.seed)
        answer = window.answers[0]
        if answer.error or not answer.ended:
            raise LlmcoreError(f"{plan.target.url}: the first request failed: {answer.error or 'no answer in time'}")


def _show(found: Mapping[str, Any]) -> None:
    click.echo(
        f"rate {found['request_rate']}: {found['answered']} of {found['requests']} in {found['seconds']:.1f} s: "
        f"{found['requests_per_s']:.2f} requests/s, {found['prompt_tokens_per_s']:,.0f} tok/s in, "
        f"{found['output_tokens_per_s']:,.0f} tok/s out"
    )
    click.echo(f"  {'ms':<12}" + "".join(f"{name:>10}" for name in ("mean", *(f"p{q}" for q in QUANTILES))))
    for metric in METRICS:
        values = found[f"{metric}_ms"]
        shown = "".join(f"{value:>10,.1f}" for value in values.values()) if values else "  none"
        click.echo(f"  {_NAMES[metric]:<12}{shown}")
    if goodput := found.get("goodput"):
        asked = ", ".join(f"{name} {most:g} ms" for name, most in goodput["objectives_ms"].items())
        click.echo(f"  goodput at {asked}: {goodput['requests_per_s']:.2f} requests/s, {goodput['share']:.1%}")
    for text, count in found["errors"].items():
        click.echo(f"  {count} failed: {text}")
    if found["unfinished"]:
        click.echo(f"  {found['unfinished']} were given up")
    click.echo(
        f"  the client used {found['client_busy']:.0%} of a core and was {found['client_late_s'] * 1e3:.1f} ms late"
    )
