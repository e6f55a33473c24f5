"""docs/metrics.md, from the tables that define the metrics."""

from __future__ import annotations

from collections.abc import Iterator

from llmcore.api.counters import CAUSES
from llmcore_server.prometheus.tables import metrics

_HEAD = """# Metrics

<!-- Written by scripts/generate_docs.py from llmcore_server.prometheus.tables and llmcore.api.counters;
`make docs` writes it again. -->

`/metrics`, on the admin listener and on the server itself, is Prometheus' text format, at most about a second old.
[operators.md](operators.md#health) says how to scrape it. Of a histogram `name` there are `name_bucket`, `name_sum`
and `name_count`. Lengths and times are observed when a request ends, those of failed ones not at all; gaps between
tokens and everything that is a gauge are there while requests run. A step that `/ready` had an idle engine do counts
as one of its steps, with one prompt token and one generated one.

`plugins/server/llmcore_server/prometheus/grafana.json` is a Grafana dashboard of them. The admin listener serves it as
`/grafana.json`: import it, and choose the Prometheus that scrapes this server.
"""


def metrics_page() -> str:
    """Returns every metric, and the reasons why requests end early."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    yield "| Name | Kind | Labels | Is |"
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
