"""The commands for authors of plugins and for measuring."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import CommandSpec, hookimpl

_CLI = "llmcore_devtools.cli"

_BENCH = {
    "latency": "Time decode steps and first tokens, by batch size, in this process.",
    "throughput": "Time whole workloads, submitted at once, in this process.",
    "serve": "Load a server over HTTP at given rates.",
}


@hookimpl
def register_commands() -> Iterable[CommandSpec]:
    """`testserver`, `bench`, `kernels --check` and `--bench`, `plugins new`."""
    yield CommandSpec(
        name="testserver",
        summary="Serve a fake model, on which clients and plugins can be tried.",
        command=f"{_CLI}.testserver:command",
        heading="Run",
        prepare="llmcore.config.process:check_limits",
    )
    yield CommandSpec(
        name="bench",
        summary="Measure latency and throughput, in process or over HTTP.",
        command=f"{_CLI}.bench:bench",
        heading="Run",
    )
    for name, summary in _BENCH.items():
        yield CommandSpec(name=f"bench {name}", summary=summary, command=f"{_CLI}.bench:{name}", heading="Commands")
    yield CommandSpec(
        name="kernels --check",
        summary="Run every kernel that fits here, and compare it with its reference.",
        command=f"{_CLI}.kernels:check",
    )
    yield CommandSpec(
        name="kernels --bench",
        summary="Time every kernel that fits here, beside its alternatives.",
        command=f"{_CLI}.kernels:bench",
    )
    yield CommandSpec(
        name="plugins new",
        summary="Write a plugin's package: code, entry point, test, README.",
        command=f"{_CLI}.new_plugin:new",
        heading="Commands",
    )
