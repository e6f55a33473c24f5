"""The interface of a program that listens for HTTP as `llmcore serve` does, without an engine. No torch.

It builds an app of `Route`s, serves it with `HttpServer`, and answers through a `Reply`, from any thread.
"""

from llmcore.api.errors import reraise_if_stopping

from llmcore_server.http.access import ApiKeys, Entry, HostNames, SameOrigin
from llmcore_server.http.app import App, build_app
from llmcore_server.http.deadlines import NO_KEY
from llmcore_server.http.errors import as_request_error, error_headers, no_route, openai_error
from llmcore_server.http.front import Route
from llmcore_server.http.reply import Reply
from llmcore_server.http.streaming import HttpServer, Limits, detach, raise_open_files
from llmcore_server.logs import log_to_stderr
from llmcore_server.settings import Access, Logging, is_loopback
from llmcore_server.supervisor.entrance import bind, listener_url

__all__ = [
    "NO_KEY",
    "Access",
    "ApiKeys",
    "App",
    "Entry",
    "HostNames",
    "HttpServer",
    "Limits",
    "Logging",
    "Reply",
    "Route",
    "SameOrigin",
    "as_request_error",
    "bind",
    "build_app",
    "detach",
    "error_headers",
    "is_loopback",
    "listener_url",
    "log_to_stderr",
    "no_route",
    "openai_error",
    "raise_open_files",
    "reraise_if_stopping",
]
