"""Routes that say how the server is and what it is: health, readiness, metrics, version."""

from collections.abc import Iterable

from llmcore.api import DialectSpec, hookimpl


@hookimpl
def register_dialects() -> Iterable[DialectSpec]:
    """`/health`, `/healthz`, `/ping`, `/liveness`, `/readiness`, `/metrics`, `/version`, `/server_info`."""
    yield DialectSpec(
        name="status",
        summary="health, readiness, metrics and version routes",
        make="llmcore_server.status.routes:make",
    )
