"""Figures on their way out: to metric sinks, to `/metrics`, to a Prometheus Pushgateway, and into the log."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from llmcore.api.bridge import Load
from llmcore.api.counters import GAP_SECONDS, TALLIES, Counted, ServerFigures
from llmcore.api.errors import ConfigError, reraise_if_stopping, text_of
from llmcore.api.protocols import MetricSink, RequestRecord
from llmcore.api.specs import MetricSinkSpec
from llmcore.config import gateway_login, without_login
from llmcore.registry.loader import made
from llmcore.registry.registry import Registry
from prometheus_client import push_to_gateway
from prometheus_client.exposition import basic_auth_handler
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from llmcore_server.messages import NO_PAGE, EngineStatus, Tallied, counts
from llmcore_server.settings import Push

logger = logging.getLogger(__name__)

PUSH_SECONDS = 5.0
"""The most seconds that one push may take."""


class Pusher:
    """Pushes the newest page that it was offered, every `push_interval` seconds; a failure is logged once in a row.

    Raises ConfigError where a login is asked for and there is none.
    """

    def __init__(self, push: Push) -> None:
        self._settings = push
        self._address = push.metric_gateway or ""
        self._gateway = without_login(self._address, self._address)
        self._more: dict[str, Any] = {}
        if push.enable_monitor_auth:
            self._more["handler"] = _with_login()
        self._labels = dict(label.split("=", 1) for label in push.grouping_key)
        self._page = b""
        self._failing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)
        self._thread.start()

    def offer(self, page: tuple[str, bytes]) -> None:
        """A newer page of `/metrics`, (content type, body)."""
        self._page = page[1]

    def close(self) -> None:
        """Push once more and end; a gateway that does not answer is given up."""
        self._stop.set()
        self._thread.join(PUSH_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(self._settings.push_interval):
            self._push()
        self._push()

    def _push(self) -> None:
        if not self._page:
            return
        try:
            push_to_gateway(
                self._address,
                job=self._settings.job_name,
                registry=_Parsed(self._page),
                grouping_key=self._labels,
                timeout=PUSH_SECONDS,
                **self._more,
            )
        except BaseException as error:  # noqa: BLE001 - whatever a gateway does, the server goes on
            reraise_if_stopping(error)
            if not self._failing:
                logger.warning(
                    "figures cannot be pushed to %s: %s", self._gateway, without_login(self._address, str(error))
                )
            self._failing = True
        else:
            if self._failing:
                logger.info("figures are pushed to %s again", self._gateway)
            self._failing = False


class _Parsed:
    """A page of Prometheus' text format as something that can be pushed."""

    def __init__(self, page: bytes) -> None:
        self._page = page.decode()

    def collect(self) -> Iterable[Metric]:
        """Its families."""
        return text_string_to_metric_families(self._page)


def _with_login() -> Callable[..., Callable[[], None]]:
    login = gateway_login()
    if login is None:
        raise ConfigError("--enable_monitor_auth needs the variables USERNAME and PASSWORD; set both, or leave it out")
    user, password = login

    def handler(url: str, method: str, timeout: float | None, headers: list[tuple[str, str]], data: bytes) -> Any:
        return basic_auth_handler(url, method, timeout, headers, data, user, password)

    return handler


class Sum:
    """The totals of several processes by name, some of which die and are replaced."""

    def __init__(self) -> None:
        self._newest: dict[str, ServerFigures] = {}
        self._counts: dict[Counted, int] = {}
        self._gaps = [0] * (len(GAP_SECONDS) + 1)
        self._gap_seconds = 0.0

    def heard(self, process: str, figures: ServerFigures) -> None:
        """Take the totals of `process`. Totals below the last ones come from a new process of that name."""
        before = self._newest.get(process, ServerFigures())
        if sum(figures.gaps) < sum(before.gaps) or any(figures.counts.get(k, 0) < n for k, n in before.counts.items()):
            before = ServerFigures()
        self._newest[process] = figures
        for key, total in figures.counts.items():
            self._counts[key] = self._counts.get(key, 0) + total - before.counts.get(key, 0)
        for i, total in enumerate(figures.gaps):
            self._gaps[i] += total - (before.gaps[i] if before.gaps else 0)
        self._gap_seconds += figures.gap_seconds - before.gap_seconds

    def figures(self) -> ServerFigures:
        """All of them together."""
        return ServerFigures(dict(self._counts), tuple(self._gaps), self._gap_seconds)


class Sinks:
    """Every plugin's metric sink. One that raises is named in the log and does not disturb the others.

    `newest`: the newest page. `ended`: requests by their `finish`. `first_tokens`: times to the first token, counted
    by bucket of `counters.GAP_SECONDS`. Raises PluginError for a sink that cannot be made.
    """

    def __init__(self, registry: Registry, push: Push | None = None) -> None:
        self._sinks: list[tuple[str, MetricSink]] = [
            (plugin.name, made(registry, MetricSinkSpec, spec.name)) for spec, plugin in registry.specs(MetricSinkSpec)
        ]
        self._failed: set[str] = set()
        self._sum = Sum()
        self.newest = NO_PAGE
        self.ended: dict[str, int] = {}
        self.first_tokens = [0] * (len(GAP_SECONDS) + 1)
        self._pusher = Pusher(push) if push is not None and push.metric_gateway is not None else None

    def request_finished(self, record: RequestRecord) -> None:
        """Pass a record on."""
        self.ended[record.finish] = self.ended.get(record.finish, 0) + 1
        if record.first_token is not None:
            self.first_tokens[bisect_left(GAP_SECONDS, record.first_token)] += 1
        self._each(lambda sink: sink.request_finished(record))

    def snapshot(self, load: Load, engines: Sequence[EngineStatus] = ()) -> None:
        """Pass the figures of all engines on: together, and each where there are several."""
        self._each(lambda sink: sink.snapshot(load.figures()))  # each gets its own: one may write into it
        each = {one.name: {**one.load.figures(), "up": float(one.serves)} for one in engines if len(engines) > 1}
        self._each(lambda sink: sink.server(replace(self.figures(), engines=each)))

    def tallied(self, process: str, body: Tallied) -> None:
        """A child's own totals."""
        self._sum.heard(process, ServerFigures(counts(body.counts), body.gaps, body.gap_seconds))

    def figures(self) -> ServerFigures:
        """The totals of all processes, this one included."""
        self._sum.heard("supervisor", TALLIES.figures())
        return self._sum.figures()

    def page(self) -> tuple[str, bytes]:
        """(content type, body) of `/metrics`: that of the first sink that has one. It is what is pushed too."""
        pages: list[tuple[str, bytes]] = []
        self._each(lambda sink: pages.extend(_page_of(sink)))
        page = self.newest = pages[0] if pages else NO_PAGE
        if self._pusher is not None:
            self._pusher.offer(page)
        return page

    def close(self) -> None:
        """Push once more, where figures are pushed."""
        if self._pusher is not None:
            self._pusher.close()

    def _each(self, call: Callable[[MetricSink], None]) -> None:
        for plugin, sink in self._sinks:
            try:
                call(sink)
            except BaseException as error:
                reraise_if_stopping(error)
                TALLIES.count("plugin_failures", plugin, "metric sink")
                first = plugin not in self._failed
                self._failed.add(plugin)
                text = "the metric sink of plugin %r failed: %s"
                logger.error(text, plugin, text_of(error), exc_info=error if first else None)


def _page_of(sink: MetricSink) -> list[tuple[str, bytes]]:
    """Its page, if it has one. TypeError for what is none."""
    page = sink.page()
    if page is None:
        return []
    content_type, body = page
    if not isinstance(content_type, str) or not isinstance(body, bytes):
        raise TypeError("page() gives a content type and bytes, or None")
    return [(content_type, body)]


class ThroughputLog:
    """One line every `interval` seconds in which something happened."""

    def __init__(self, interval: float, now: float, before: Load = Load()) -> None:  # noqa: B008 - it is frozen
        self._interval = interval
        self._last = now
        self._before = before

    def line(self, load: Load, now: float) -> str | None:
        """The line that is due, or None."""
        seconds = now - self._last
        if seconds < self._interval:
            return None
        before, self._before, self._last = self._before, load, now
        if load.steps == before.steps:
            return None
        prompt = load.prompt_tokens - before.prompt_tokens
        cached = load.cached_tokens - before.cached_tokens
        out = load.output_tokens - before.output_tokens
        total = load.kv_total or 1
        return (
            f"{out / seconds:.1f} tok/s out, {prompt / seconds:.1f} tok/s in ({_share(cached, prompt)} cached), "
            f"{load.running} running, {load.waiting} waiting, "
            f"KV {_share(load.kv_live, total)} live, {_share(load.kv_cached, total)} cached"
        )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
