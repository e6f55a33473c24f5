"""The settings of the server. A field is an option of `llmcore serve`, a YAML key and an environment variable."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from llmcore.api import Config, ConfigError, Origins, option, without_effect


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server's addresses and processes."""

    host: str = option("127.0.0.1", "Address to listen on.", aliases=("server_name",), first_page=True)
    port: int = option(
        8000, "Port to listen on (0: any free one).", aliases=("server_port",), low=0, high=65535, first_page=True
    )
    httpserver_workers: int = option(
        1, "HTTP worker processes on one shared listening socket.", low=1, high=64, first_page=True
    )
    routing_strategy: str = option(
        "cost",
        "How one of several engines (dp) is chosen for a request: the name of a balancer, as for llmcore route.",
    )
    max_connections: int | None = option(
        None,
        "Most connections of one HTTP worker; further ones get a 503 at once (default: 4096, or running_max_req_size "
        "+ 256 if that is more).",
        low=1,
    )
    max_connections_per_address: int = option(
        0,
        "Most connections of one HTTP worker from one address (0: any number; behind a proxy all clients have one "
        "address).",
        low=0,
    )
    sse_keep_alive: float = option(
        15.0,
        "Seconds of silence in a stream until the server sends a comment, so that proxies do not close the connection "
        "(0: never).",
        low=0,
    )
    zmq_mode: str = option(
        "ipc:///tmp/",
        "Messages between processes: through a private directory, or over loopback.",
        choices=("ipc:///tmp/", "tcp://"),
    )
    disable_log_stats: bool = option(False, "Do not log throughput.")
    log_stats_interval: int = option(10, "Seconds between throughput lines.", low=1)
    drain_timeout: float = option(30.0, "Seconds that open requests may go on after SIGTERM.", low=0)
    watchdog_timeout: int = option(
        30,
        "Seconds until an engine is killed that has work and finishes no step, or an HTTP worker that is silent.",
        low=1,
    )
    admin_host: str = option(
        "127.0.0.1",
        "Address of the admin listener: health, metrics, dashboard. It needs api_keys if other machines reach it.",
    )
    admin_port: int | None = option(
        None,
        "Port of the admin listener; 0: any free one (default: port + 1, or any free one if that is taken).",
        low=0,
        high=65535,
    )
    disable_admin: bool = option(False, "Do not start the admin listener.")
    ready_timeout: int = option(
        30,
        "Seconds without a finished step until /ready of the admin listener answers 503; an idle engine is asked to "
        "make a step.",
        low=1,
    )
    health_monitor: bool = option(
        False,
        "Replace an engine that died or hangs, after a pause; without this option the server ends with its last.",
    )
    restart_pause: float = option(
        1.0, "Seconds until a dead engine is replaced; every further death within ten minutes doubles them.", low=0
    )
    restart_limit: int = option(
        5, "Most replacements of an engine within ten minutes; then the server ends (0: any number).", low=0
    )

    def check(self, config: Config, origins: Origins) -> Iterator[str]:
        """Yields warnings. Raises ConfigError for an admin listener that other machines reach without a key."""
        keys = config.section(Access).api_keys
        exposed = not self.disable_admin and not is_loopback(self.admin_host)
        if exposed and not keys:
            raise ConfigError(
                f"--admin_host {self.admin_host} lets others read the server's settings and figures, and there are no "
                "--api_keys; set some, or keep it on 127.0.0.1."
            )
        if not self.health_monitor:
            why = "without health_monitor a server ends with its engine"
            yield from without_effect(origins, ("restart_pause", "restart_limit"), why)
        if config.model.dp == 1:
            yield from without_effect(origins, ("routing_strategy",), "a server has one engine without dp")
        if self.disable_admin:
            yield from without_effect(origins, ("admin_host", "admin_port", "ready_timeout"), "disable_admin is set")
        if self.disable_log_stats:
            yield from without_effect(origins, ("log_stats_interval",), "disable_log_stats is set")
        if keys and not config.section(Access).ssl and not is_loopback(self.host):
            yield f"--host {self.host} without --ssl: API keys travel as they are, unless a proxy encrypts them."
        if exposed:
            yield f"--admin_host {self.admin_host}: API keys travel as they are, unless a proxy encrypts them."


@dataclass(frozen=True, kw_only=True)
class Access:
    """API keys, CORS and TLS."""

    api_keys: tuple[str, ...] = option(
        (),
        "API keys. Every request must bring one, except for health and readiness. Keep them out of the command line: "
        "use LLMCORE_API_KEYS or the YAML file.",
        secret=True,
        first_page=True,
    )
    allow_origins: tuple[str, ...] = option((), "Origins of web pages that may call this server (CORS); * for any.")
    allow_methods: tuple[str, ...] = option(("*",), "Methods that these web pages may use.")
    allow_headers: tuple[str, ...] = option(("*",), "Headers that these web pages may send.")
    allow_credentials: bool = option(
        False, "Let these web pages send credentials, such as cookies; not with origin *."
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Further names that a request's Host header may have, besides localhost, this machine's name and any address; "
        "* for any. Checked if names are given, and on loopback without api_keys.",
    )
    ssl: bool = option(False, "Speak HTTPS; needs ssl_certfile and ssl_keyfile.")
    ssl_certfile: str | None = option(
        None, "Certificate chain, PEM (or the variable SSL_CERTFILE).", variables=("SSL_CERTFILE",)
    )
    ssl_keyfile: str | None = option(
        None,
        "The certificate's private key, PEM, without a password (or the variable SSL_KEYFILE).",
        variables=("SSL_KEYFILE",),
    )
    disable_fastapi_docs: bool = option(False, "Do not serve /openapi.json and /docs.")

    def check(self, config: Config, origins: Origins) -> Iterator[str]:
        """Yields warnings. Raises ConfigError for a key, a host name or a combination that cannot work."""
        for key in self.api_keys:
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise ConfigError(
                    f"{origins['api_keys']} holds a key that no header can carry; use ASCII without spaces."
                )
        if self.allow_credentials and "*" in self.allow_origins:
            raise ConfigError(
                "--allow_credentials with --allow_origins '*' would let any web page act for its reader; list origins."
            )
        for name in self.allowed_hosts:
            if name != "*" and not re.fullmatch(r"[A-Za-z0-9._-]+", name):
                raise ConfigError(
                    f"{origins['allowed_hosts']} holds {name!r}; give a name without scheme or port, "
                    "e.g. llm.example.com."
                )
        if self.ssl and not (self.ssl_certfile and self.ssl_keyfile):
            missing = "--ssl_keyfile" if self.ssl_certfile else "--ssl_certfile"
            raise ConfigError(f"--ssl needs {missing}; give the paths of a certificate chain and its key, both PEM.")
        if not self.allow_origins:
            why = "allow_origins names no origin that may call this server"
            yield from without_effect(origins, ("allow_methods", "allow_headers", "allow_credentials"), why)
        if not self.ssl:
            yield from without_effect(origins, ("ssl_certfile", "ssl_keyfile"), "ssl is not set")


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Limits on requests and their time; every answer counts (`n`, beams)."""

    max_waiting_requests: int | None = option(
        None,
        "Most requests that wait for a place; further ones get 429 (default: running_max_req_size; 0: any number).",
        unit="requests",
        low=0,
    )
    max_waiting_tokens: int | None = option(
        None,
        "Most prompt tokens that wait; further requests get 429 (default: 4 times the KV slots; 0: any number).",
        unit="tokens",
        low=0,
    )
    max_requests_per_key: int | None = option(
        None,
        "Most requests of one API key that wait or run; further ones get 429 (default: with several keys, half of all "
        "that may wait and run; 0: any number).",
        unit="requests",
        low=0,
    )
    queue_timeout: float = option(
        0.0, "Seconds that a request may wait before it runs; then it gets 503 (0: any number).", low=0
    )
    first_token_timeout: float = option(
        0.0, "Seconds from a request's arrival to its first token; then it gets 504 (0: any number).", low=0
    )
    request_timeout: float = option(
        0.0,
        "Seconds from a request's arrival to its end; then it gets 504, or an error in its stream (0: any number). "
        "The header x-request-timeout can only shorten it.",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class Push:
    """Figures for a Prometheus Pushgateway."""

    metric_gateway: str | None = option(
        None, "Address of a Prometheus Pushgateway, to which the server pushes figures.", login=True
    )
    job_name: str = option("llmcore", "Name of the job under which figures are pushed.")
    grouping_key: tuple[str, ...] = option((), "More labels that group the pushed figures, key=value.")
    push_interval: int = option(10, "Seconds between two pushes.", low=1)
    enable_monitor_auth: bool = option(
        False, "Log in at the gateway with the variables USERNAME and PASSWORD (HTTP basic auth)."
    )

    def check(self, config: Config, origins: Origins) -> Iterator[str]:
        """Yields warnings. Raises ConfigError for labels that the gateway would refuse."""
        keys = [label.partition("=")[0] for label in self.grouping_key]
        for label, key in zip(self.grouping_key, keys, strict=True):
            if not (re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", key) and label.partition("=")[2]):
                raise ConfigError(f"--grouping_key {label!r} needs the form key=value, e.g. instance=node1")
        if len(set(keys)) < len(keys) or "job" in keys:
            raise ConfigError(f"--grouping_key names a key twice, or job, which --job_name says: {', '.join(keys)}.")
        if self.metric_gateway is None:
            options = ("job_name", "grouping_key", "push_interval", "enable_monitor_auth")
            yield from without_effect(origins, options, "metric_gateway names no Pushgateway")


@dataclass(frozen=True, kw_only=True)
class Registration:
    """Registration at a proxy, `llmcore route` or another."""

    proxy_url: str | None = option(
        None, "URL of the proxy at which to register once ready, and to deregister before the end."
    )
    proxy_key: str | None = option(
        None, "The proxy's admin key. Keep it out of the command line: use LLMCORE_PROXY_KEY.", secret=True
    )
    node_url: str | None = option(
        None,
        "URL under which the proxy reaches this server (default: --host, or the address from which this machine "
        "reaches the proxy, with --port).",
    )

    def check(self, config: Config, origins: Origins) -> Iterator[str]:
        """Yields warnings. Raises ConfigError for a URL or a key that cannot work. URLs are not shown, because a
        password may be in one."""
        for name in ("proxy_url", "node_url"):
            given = getattr(self, name)
            if given is not None and not _plain_url(given):
                raise ConfigError(f"{origins[name]}: write http://HOST:PORT, without a user, query or fragment.")
        key = self.proxy_key
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(f"{origins['proxy_key']} is a key that no header can carry; use ASCII without spaces.")
        if self.proxy_url is None:
            yield from without_effect(origins, ("proxy_key", "node_url"), "proxy_url names no proxy")


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Changes to prompts before they reach the engine."""

    token_healing_mode: bool = option(
        False,
        "Token healing: generate the last tokens of every prompt again, and do not show them in the answer.",
    )
    long_truncation_mode: str | None = option(
        None,
        "Cut a prompt that leaves too little room for its answer: head drops its beginning, center its middle.",
        choices=("head", "center"),
        unset="None",
    )


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Logging."""

    log_level: str = option(
        "INFO",
        "Lowest severity that is logged; DEBUG logs prompts too.",
        choices=("CRITICAL", "FATAL", "ERROR", "WARN", "WARNING", "INFO", "DEBUG", "NOTSET"),
    )
    log_format: str = option(
        "text", "Format of every process's log: lines of text, or one JSON object per line.", choices=("text", "json")
    )
    max_log_len: int | None = option(
        None, "Most characters, and most token ids, of a prompt in the log (default: all).", low=0
    )

    def check(self, config: Config, origins: Origins) -> Iterator[str]:
        """Yields a warning for a setting without effect."""
        if self.log_level not in ("DEBUG", "NOTSET"):
            yield from without_effect(origins, ("max_log_len",), "prompts are logged with log_level DEBUG only")


SECTIONS = (Server, Access, Admission, Push, Registration, Prompts, Logging)
"""In the order of `llmcore serve --help`."""


def _plain_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:  # an open bracket, an invalid port
        return False
    plain = url.isascii() and url.isprintable() and " " not in url and "@" not in parts.netloc
    return bool(plain and host and parts.scheme in ("http", "https") and not parts.query and not parts.fragment)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "ip6-localhost", "ip6-loopback")
