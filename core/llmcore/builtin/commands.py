"""The commands that need only the engine."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import CommandSpec, hookimpl

_RUN = {
    "generate": "Answer a file of prompts, offline.",
}
_LOOK = {
    "plan": "Predict what fits, from a model's headers alone.",
    "models": "List the model families that can be served.",
    "kernels": "List kernels, explain which one is chosen, check and time them.",
    "modes": "List what --mode accepts.",
    "plugins": "List plugins and what they contribute; `new` writes one.",
    "hooks": "List the hooks a plugin can implement.",
    "config": "Show settings and where each comes from.",
    "env": "Describe this machine, for a bug report.",
}


@hookimpl
def register_commands() -> Iterable[CommandSpec]:
    """The commands of core; each is one module of llmcore.cli."""
    for heading, commands in (("Run", _RUN), ("Look", _LOOK)):
        for name, summary in commands.items():
            yield CommandSpec(name=name, summary=summary, command=f"llmcore.cli.{name}:command", heading=heading)
