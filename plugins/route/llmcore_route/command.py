"""`llmcore route`: several servers at one address."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import click
from llmcore.api import BalancerSpec
from llmcore.api.cli import Resolved, SettingsCommand, load

F = TypeVar("F", bound=Callable[..., Any])

_SECONDS = click.FloatRange(min=0, min_open=True)


def _option(name: str, *more: str, **settings: Any) -> Callable[[F], F]:
    """An option of click, also with dashes in place of underscores, as LMDeploy writes it."""
    names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", *more))
    return click.option(name, *names, **settings)


def _key(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not (value and value.isascii() and value.isprintable() and " " not in value):
        raise click.BadParameter("no header can carry this key; use ASCII without spaces", ctx, parameter)
    return value


@click.command(cls=SettingsCommand, groups=("plugins",))
@_option(
    "host", "--server_name", "--server-name", default="127.0.0.1", show_default=True, help="Address to listen on."
)
@_option(
    "port",
    "--server_port",
    "--server-port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on (0: any free one).",
)
@_option("routing_strategy", default="cost", show_default=True, help="How a node is chosen: the name of a balancer.")
@_option(
    "route_nodes",
    multiple=True,
    metavar="HOST[:PORT]",
    help="A host that may be a node; repeat the option. Without admin_key its servers may add and remove nodes.",
)
@_option(
    "admin_key",
    envvar="ROUTE_ADMIN_KEY",
    callback=_key,
    help="Key for /nodes/*. Keep it out of the command line: use ROUTE_ADMIN_KEY.",
)
@_option(
    "node_api_key",
    envvar="ROUTE_NODE_API_KEY",
    callback=_key,
    help="API key that every node gets. Keep it out of the command line: use ROUTE_NODE_API_KEY.",
)
@_option(
    "api_keys",
    multiple=True,
    callback=lambda ctx, parameter, values: tuple(_key(ctx, parameter, value) for value in values),
    help="API key that clients must send one of. Keep them out of the command line: use LLMCORE_API_KEYS.",
)
@_option(
    "allowed_hosts",
    multiple=True,
    help="A further name that a request's Host header may have. Checked if names are given, and on loopback without "
    "api_keys.",
)
@_option(
    "max_concurrent_requests",
    type=click.IntRange(1, 16384),
    default=1024,
    show_default=True,
    help="Most requests on their way; further ones get a 503.",
)
@_option(
    "health_interval", type=_SECONDS, default=5.0, show_default=True, help="Seconds between two checks of a node."
)
@_option(
    "health_timeout", type=_SECONDS, default=5.0, show_default=True, help="Seconds that a node has for its answer."
)
@_option(
    "drain_timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds that open requests may go on after SIGTERM.",
)
@_option(
    "log_level",
    type=click.Choice(("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")),
    default="INFO",
    show_default=True,
    help="Lowest severity that is logged.",
)
@_option(
    "log_format",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="Format of the log: lines of text, or one JSON object per line.",
)
def command(resolved: Resolved, routing_strategy: str, log_level: str, log_format: str, **given: Any) -> None:
    """Serve several servers at one address.

    Servers come with POST /nodes/add, as LMDeploy's do with --proxy-url and llmcore's with --proxy_url. Every other
    path goes to one of them. SIGTERM or Ctrl-C ends the router in order; a second signal ends open requests.
    """
    # the server's parts take longer to import than a help page should
    from llmcore_server.listening import Access, Logging, log_to_stderr

    from llmcore_route.server import Settings, serve

    given["api_keys"] = given["api_keys"] or resolved.config.section(Access).api_keys
    settings = Settings(**given)
    balancer = load(resolved.registry.find(BalancerSpec, routing_strategy).make)(Random())
    log_to_stderr(Logging(log_level=log_level, log_format=log_format), "route")
    serve(settings, balancer)
