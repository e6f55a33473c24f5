"""A request on its way: to a node, to another one if the first does not answer, and the answer back to the client."""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Callable

from llmcore.api import RequestError
from llmcore.fleet.destinations import Stay
from llmcore_server.listening import Reply, as_request_error, error_headers, openai_error, reraise_if_stopping

from llmcore_route.nodes import Node, Nodes, ending
from llmcore_route.prompts import Wish
from llmcore_route.upstream import Call, Exchange, Unanswered, Unreachable, answer_headers, piece, whole

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""Nodes that a request is sent to before the client hears that none answered."""

STREAMS = frozenset({"text/event-stream", "application/x-ndjson", "application/jsonl", "application/json-seq"})
"""Media types of answers that are sent on as they come. Others are read whole first, so they can be tried again."""

PIECE_BYTES = 64 << 10
ANSWER_BYTES = 256 << 20
"""Most bytes of an answer that is read whole."""

UNTYPED = "application/octet-stream"


class Relay:
    """One request. `run` is for a thread of its own; any thread may `cancel` and `end` it."""

    def __init__(self, call: Call, wish: Wish, reply: Reply, stay: Stay[Node], nodes: Nodes, key: str | None) -> None:
        self._call, self._wish, self._reply = call, wish, reply
        self._stay, self._nodes, self._key = stay, nodes, key
        self._exchange: Exchange | None = None
        self._ended: RequestError | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Answer the request. Every failure becomes an answer, or ends the client's stream."""
        tried: list[Node] = []
        try:
            while not self._serve(tried):
                self._stay = self._nodes.take(self._wish, tried)
        except BaseException as error:  # noqa: BLE001 - a balancer is a plugin, and the client waits for an answer
            reraise_if_stopping(error)
            failure = error if isinstance(error, Exception) else RuntimeError(str(error))
            self._fail(as_request_error(failure))

    def cancel(self) -> None:
        """The client has left."""
        self.end(RequestError("the client has left", status=499))

    def end(self, why: RequestError) -> None:
        """Give up: a client that has got nothing yet gets `why`, a stream is broken off."""
        with self._lock:
            self._ended = why
            exchange = self._exchange
        if exchange is not None:
            exchange.cancel()

    def _serve(self, tried: list[Node]) -> bool:
        """Try the node of `_stay`. False if another one may be tried. Raises RequestError if none may."""
        stay, answered = self._stay, False
        exchange = Exchange(stay.at.place, self._key)
        try:
            with self._lock:
                self._exchange = exchange
                self._raise_if_ended()
            response = exchange.open(self._call)
            self._pass_on(response, stay)
            answered = True
        except Unanswered as error:
            self._raise_if_ended()
            if self._reply.streaming:
                logger.warning("node %s: %s", stay.at.url, error)
                self._reply.break_off()
                return True
            if isinstance(error, Unreachable):  # else a client whose requests break connections could take nodes out
                self._nodes.failed(stay.at, str(error))
            tried.append(stay.at)
            if len(tried) == ATTEMPTS:
                raise _bad_gateway() from error
            return False
        finally:
            exchange.close()
            stay.leave(whole=answered)
        return True

    def _pass_on(self, response: http.client.HTTPResponse, stay: Stay[Node]) -> None:
        headers, media = answer_headers(response), response.headers.get("content-type", UNTYPED)
        streams = media.partition(";")[0].strip().lower() in STREAMS and response.length is None
        if response.status != 200 or not streams or self._call.method == "HEAD":
            body = whole(response, ANSWER_BYTES)
            stay.answered()
            self._reply.respond(response.status, body, media, headers)
            return
        first = piece(response, PIECE_BYTES)
        stay.answered()
        self._reply.stream_as(media)
        self._reply.add_headers(headers)
        self._reply.stream(first)
        while data := piece(response, PIECE_BYTES):
            self._reply.stream(data)
        self._reply.end()

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _fail(self, error: RequestError) -> None:
        if self._reply.streaming:
            self._reply.break_off()
        else:
            self._reply.respond(error.status, openai_error(error), headers=error_headers(error))


class Relays:
    """All requests on their way, of which there are at most `most`. `key`: what nodes get as the API key."""

    def __init__(self, nodes: Nodes, most: int, key: str | None) -> None:
        self._nodes, self._most, self._key = nodes, most, key
        self._running: set[Relay] = set()
        self._lock = threading.Lock()

    def start(self, call: Call, wish: Wish, detach: Callable[[], Reply]) -> None:
        """Send a request to a node, on a thread of its own. Raises RequestError where it cannot be sent now.

        `detach` is called once the request has its node.
        """
        with self._lock:
            if len(self._running) >= self._most:
                raise RequestError(
                    f"The router has {self._most} requests on their way (--max_concurrent_requests); try again.",
                    code="server_overloaded",
                    status=503,
                )
            stay = self._nodes.take(wish)
            reply = detach()
            relay = Relay(call, wish, reply, stay, self._nodes, self._key)
            self._running.add(relay)
        reply.on_close(relay.cancel)
        threading.Thread(target=self._run, args=(relay,), name="relay", daemon=True).start()

    def end_all(self) -> None:
        """End all that are still on their way, because the router ends."""
        with self._lock:
            running = list(self._running)
        for relay in running:
            relay.end(ending())

    def _run(self, relay: Relay) -> None:
        try:
            relay.run()
        finally:
            with self._lock:
                self._running.discard(relay)


def _bad_gateway() -> RequestError:
    text = f"{ATTEMPTS} nodes did not answer this request; try again, or see GET /nodes/status."
    return RequestError(text, code="engine_failed", status=502)
