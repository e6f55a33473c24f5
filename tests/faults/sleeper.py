"""A dialect whose route holds the thread that serves it for as long as it is asked to."""

from __future__ import annotations

import time
from collections.abc import Iterable

import falcon
from llmcore.api import DialectSpec, hookimpl
from llmcore_server.api import Front, Route


class Sleep:
    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        time.sleep(float(req.get_param("seconds") or 1))


def make(front: Front) -> Iterable[Route]:
    yield Route("/sleep", Sleep())


@hookimpl
def register_dialects() -> Iterable[DialectSpec]:
    yield DialectSpec(name="sleeper", make=f"{__name__}:make")
