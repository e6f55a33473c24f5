"""HTTP over waitress: a strict reader of requests, answers that need no thread, and limits of our own.

A responder that calls `detach` returns at once. Its worker thread goes back to the pool, and the channel keeps the
request, so the connection stays busy. Any thread may send through the `Reply`, and no send ever blocks: the main loop
(loop.py), which is ours, sends the bytes that the socket does not take.

This folder is the only place that knows the insides of waitress. They are pinned (`WAITRESS`), and
tests/server/http/test_waitress.py holds every one that is used. Every time limit is by the monotonic clock.

Locks are taken in this order: the reply's, channel.requests_lock, the send_batch's, channel.outbuf_lock.
"""

from __future__ import annotations

from llmcore_server.http.streaming.limits import Limits, raise_open_files
from llmcore_server.http.streaming.server import HttpServer
from llmcore_server.http.streaming.tasks import detach

WAITRESS = "3.0.2"
"""The version whose internals this folder was written against."""

__all__ = ["WAITRESS", "HttpServer", "Limits", "detach", "raise_open_files"]
