"""Routes that say how the server is: health, readiness, metrics."""

from collections.abc import Iterable

from llmcore.api import DialectSpec, hookimpl


@hookimpl
def register_dialects() -> Iterable[DialectSpec]:
    """`/health`, `/healthz`, `/liveness`, `/readiness`, `/metrics`."""
    yield DialectSpec(
        name="status",
        summary="health, readiness and metrics routes",
        make="llmcore.builtin.status.routes:make",
    )
