"""`python -m llmcore_server.http.worker FD`: one HTTP worker process.

It loads plugins and the tokenizer while the engines load the model. Then it loads the dialects and serves on the
inherited listening socket. It imports neither torch nor transformers.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from llmcore.api.errors import Stopped
from llmcore.api.processors import LogitsProcessorSpec
from llmcore.api.specs import BalancerSpec, DialectSpec, OutputParserSpec, TokenizerSpec
from llmcore.registry.loader import build_registry, load
from llmcore.registry.registry import Registry
from llmcore.text.source import open_tokenizer

from llmcore_server import child
from llmcore_server.chat.parser_choice import open_parsers
from llmcore_server.http.access import fingerprint, server_guard
from llmcore_server.http.app import build_app
from llmcore_server.http.bridge import FleetBridge
from llmcore_server.http.front import Front, Route
from llmcore_server.http.healing import check_healing
from llmcore_server.http.observers import HOOK, Observers
from llmcore_server.http.streaming import HttpServer, Limits
from llmcore_server.http.streaming.limits import connections
from llmcore_server.logs import log_request
from llmcore_server.messages import WorkerLaunch, read_facts
from llmcore_server.settings import Access, Prompts, Server
from llmcore_server.templates import render_in_children

STATE_SECONDS = 2.0
"""Seconds to wait for the supervisor's first message before serving without it."""


def main() -> int:
    """Run until told to stop; the exit code."""
    launch = child.begin(WorkerLaunch)
    logging.getLogger("waitress").setLevel(logging.ERROR)
    child.raise_on_stop()
    try:
        return serve(launch)
    except Stopped:
        return 0
    except BaseException as error:  # noqa: BLE001 - a plugin's exit too: the operator gets one line and a log file
        child.report_failure(launch, error)
        return 1


def serve(launch: WorkerLaunch) -> int:
    """Load everything, accept connections, and let requests end when asked to stop."""
    registry = build_registry(launch.config)
    with registry.lifetime(launch.config):
        return _serve(launch, registry)


def _serve(launch: WorkerLaunch, registry: Registry) -> int:
    sources = [spec for spec, _ in registry.specs(TokenizerSpec)]
    parsers = [spec for spec, _ in registry.specs(OutputParserSpec)]
    model = launch.config.model
    tokenizer = open_tokenizer(sources, Path(launch.tokenizer_dir), model.tokenizer_mode, model.chat_template, parsers)
    render_in_children(tokenizer)
    if launch.config.section(Prompts).token_healing_mode:
        check_healing(tokenizer)
    stop: Callable[[float], None] = lambda grace: server.stop(grace)  # noqa: E731 - the server needs the bridge first
    routing = launch.config.section(Server).routing_strategy
    balancer = load(registry.find(BalancerSpec, routing).make)(Random())
    facts = read_facts(launch)
    bridge = FleetBridge(launch, facts, on_shutdown=stop, balancer=balancer)
    plugins = [Observers(registry)] if registry.implementers(HOOK) else []
    front = Front(
        config=launch.config,
        bridge=bridge,
        tokenizer=tokenizer,
        facts=facts,
        state=lambda: bridge.state,
        parsers=open_parsers(parsers, model, tokenizer),
        processors=frozenset(
            spec.name for spec, _ in registry.specs(LogitsProcessorSpec) if spec.enabled(launch.config.plugin_options)
        ),
        observers=(bridge.report, log_request, *plugins),
        key_names=tuple(fingerprint(key) for key in launch.config.section(Access).api_keys),
        gate=bridge.gate,
        deadlines=bridge.deadlines,
    )
    routes = dialect_routes(registry, front)
    app = build_app(routes, launch.config.section(Access), guard=server_guard(launch.config), gate=bridge.gate)
    server = HttpServer(
        app,
        socket.socket(fileno=launch.listen_fd),
        connections=connections(launch.config),
        admit=app.admit,
        encoder=app.encoder,
        limits=Limits(per_address=launch.config.section(Server).max_connections_per_address),
        send_batch=bridge.send_batch,
    )
    signal.signal(child.STOP, lambda *_: server.stop(launch.config.section(Server).drain_timeout))
    hub = threading.Thread(target=server.run_hub, args=(lambda: bridge.run(server.turns), "this worker"), name="hub")
    child.freeze()
    hub.start()
    try:
        bridge.announce()
        bridge.await_state(STATE_SECONDS)
        server.run(draining=bridge.drain, late=bridge.end_all)
    finally:  # also when the main loop failed: the process, and every open connection, would outlive it with the hub
        bridge.stop()
        hub.join()
        for observers in plugins:
            observers.close()
    return int(server.deaf)


def dialect_routes(registry: Registry, front: Front) -> Iterator[tuple[Route, str]]:
    """Every route of every dialect, with the name of its plugin."""
    for spec, plugin in registry.specs(DialectSpec):
        for route in load(spec.make)(front):
            yield route, plugin.name


if __name__ == "__main__":
    sys.exit(main())
