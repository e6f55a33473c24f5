"""docs/metrics.md, from the tables that define the metrics."""

from __future__ import annotations

from collections.abc import Iterator

from llmcore.api.counters import CAUSES
from llmcore_server.prometheus.tables import metrics

_HEAD = """# Metrics

<!-- Written by scripts/generate_docs.py from llmcore_server.prometheus.tables and llmcore.api.counters;
`make docs` writes it again. -->

The admin listener and the server answer `/metrics` in Prometheus' text format. The figures are at most about a second
old. [operators.md](operators.md#health) has a scrape configuration. A histogram `name` has the series `name_bucket`,
`name_sum` and `name_count`. Lengths and times are observed when a request ends, and not for failed requests. Gauges,
and gaps between tokens, are also observed while requests run. If `/ready` makes an idle engine run a step, the step
counts, with one prompt token and one generated token.

`plugins/server/llmcore_server/prometheus/grafana.json` is a Grafana dashboard of these metrics. The admin listener
serves it as `/grafana.json`. Import it, and choose the Prometheus that scrapes this server.
"""


def metrics_page() -> str:
    """Returns every metric, and the reasons why requests end early."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    yield "| Name | Kind | Labels | Meaning |"
    yield "| --- | --- | --- | --- |"
    for metric in metrics():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"
    yield ""
    yield "## Causes"
    yield ""
    yield "`cause` of `llmcore_request_ended_total`, and of a request's line in the log:"
    yield ""
    yield "| Cause | Means |"
    yield "| --- | --- |"
    for cause, meaning in CAUSES.items():
        yield f"| `{cause}` | {meaning} |"
