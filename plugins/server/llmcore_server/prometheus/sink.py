"""LightLLM's metrics under llmcore's name, and what slots, cache, causes and failures add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmcore.api import COUNTS, GAP_SECONDS, RequestRecord, ServerFigures
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from llmcore_server.prometheus import tables
from llmcore_server.prometheus.tables import PREFIX

_CACHE = "cache_"
"""The beginning of the names of the prefix cache's own figures."""

_OUTCOMES = {"stop": "request_success", "length": "request_success", "abort": "request_abort"}


class PrometheusSink:
    """protocols.MetricSink. Counters get Prometheus' `_total` at the end of their names."""

    def __init__(self) -> None:
        # Else every metric has a second series that says when it was made.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self._counters = {n: Counter(PREFIX + n, text, registry=registry) for n, text in tables.COUNTERS.items()}
        self._ended = Counter(PREFIX + tables.ENDED, tables.ENDED_HELP, ["finish", "cause"], registry=registry)
        self._histograms = {
            n: (Histogram(PREFIX + n, text, buckets=buckets, registry=registry), observe)
            for n, (text, buckets, observe) in tables.HISTOGRAMS.items()
        }
        self._gauges = {f: Gauge(PREFIX + n, text, registry=registry) for n, (f, text) in tables.GAUGES.items()}
        self._totals = {f: Counter(PREFIX + n, text, registry=registry) for n, (f, text) in tables.TOTALS.items()}
        self._cache = Gauge(PREFIX + tables.CACHE, tables.CACHE_HELP, ["figure"], registry=registry)
        self._cache_config = Gauge(
            PREFIX + tables.CACHE_CONFIG, tables.CACHE_CONFIG_HELP, tables.CACHE_CONFIG_LABELS, registry=registry
        )
        self._before: dict[str, float] = {}
        self._server = _Server()
        registry.register(self._server)

    def request_finished(self, record: RequestRecord) -> None:
        """Count a request and observe its lengths and times; those of failed ones say nothing and are left out."""
        self._counters["request_count"].inc()
        self._ended.labels(record.finish, record.cause).inc()
        outcome = _OUTCOMES.get(record.finish, "request_failure")
        self._counters[outcome].inc()
        if outcome == "request_failure":
            return
        for histogram, observe in self._histograms.values():
            value = observe(record)
            if value is not None:
                histogram.observe(value)

    def snapshot(self, values: Mapping[str, float]) -> None:
        """Take over the engine's figures."""
        for field, gauge in self._gauges.items():
            gauge.set(values[field])
        for field, counter in self._totals.items():
            counter.inc(max(0.0, values[field] - self._before.get(field, 0.0)))
            self._before[field] = values[field]
        if granule := values["kv_granule"]:
            self._cache_config.clear()  # an engine that takes the place of another may have more or fewer slots
            self._cache_config.labels(int(granule), int(values["kv_total"] / granule)).set(1)
        for field in (name for name in values if name.startswith(_CACHE)):
            self._cache.labels(field.removeprefix(_CACHE)).set(values[field])

    def server(self, figures: ServerFigures) -> None:
        """Take over what all processes have counted."""
        self._server.figures = figures

    def page(self) -> tuple[str, bytes]:
        """Prometheus' text format."""
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)


class _Server(Collector):
    """The newest totals of the processes, which count them elsewhere."""

    def __init__(self) -> None:
        self.figures = ServerFigures()

    def collect(self) -> Iterator[Metric]:
        """Prometheus' interface."""
        for name, (labels, text) in COUNTS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=labels)
            totals = {values: n for (counted, values), n in self.figures.counts.items() if counted == name}
            for values, n in (totals or ({} if labels else {(): 0})).items():
                family.add_metric(values, n)
            yield family
        kinds: tuple[tuple[Mapping[str, tuple[str, str]], type[GaugeMetricFamily | CounterMetricFamily]], ...] = (
            (tables.ENGINE_GAUGES, GaugeMetricFamily),
            (tables.ENGINE_TOTALS, CounterMetricFamily),
        )
        for table, kind in kinds:
            for name, (figure, text) in table.items() if self.figures.engines else ():
                each = kind(PREFIX + name, text, labels=["engine"])
                for engine, figures in self.figures.engines.items():
                    each.add_metric([engine], figures[figure])
                yield each
        below, buckets = 0, []
        ends = [*(f"{end:g}" for end in GAP_SECONDS), "+Inf"]
        for end, n in zip(ends, self.figures.gaps or (0,) * len(ends), strict=True):
            below += n
            buckets.append((end, float(below)))
        yield HistogramMetricFamily(
            PREFIX + tables.GAPS, tables.GAPS_HELP, buckets=buckets, sum_value=self.figures.gap_seconds
        )
