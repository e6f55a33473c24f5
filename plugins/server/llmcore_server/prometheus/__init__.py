"""Figures for Prometheus."""

from collections.abc import Iterable

from llmcore.api import MetricSinkSpec, hookimpl


@hookimpl
def register_metric_sinks() -> Iterable[MetricSinkSpec]:
    """The sink that writes `/metrics`."""
    yield MetricSinkSpec(
        name="prometheus",
        summary="figures in Prometheus' text format at /metrics",
        make="llmcore_server.prometheus.sink:PrometheusSink",
    )
