"""Figures to a Prometheus Pushgateway, from a thread of its own: a gateway that hangs holds nobody up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from llmcore.api.errors import ConfigError
from llmcore.config import gateway_login, without_login
from prometheus_client import push_to_gateway
from prometheus_client.exposition import basic_auth_handler
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from llmcore_server.settings import Push

logger = logging.getLogger(__name__)

PUSH_SECONDS = 5.0
"""How long one push may take."""


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
        except Exception as error:  # noqa: BLE001 - whatever a gateway does, the server goes on
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
