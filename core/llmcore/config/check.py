"""What settings may not say together, and what they say without effect."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from llmcore.config.tree import Config
from llmcore.errors import ConfigError

Origins = Mapping[str, str]


def check_config(config: Config, origins: Origins) -> list[str]:
    """Raises ConfigError for the first contradiction; returns a sentence for each that has no
    effect or is a risk."""
    for problem in _PROBLEMS:
        text = problem(config, origins)
        if text:
            raise ConfigError(text)
    idle = [f"{origins[name]} has no effect: {why}." for name, why in _without_effect(config) if _given(origins, name)]
    return [*idle, *_exposed(config)]


def check_model_dir(config: Config) -> Path:
    """The directory (or GGUF file) to serve, absolute; ConfigError says what is missing and what to do."""
    if config.model.model_dir is None:
        raise ConfigError("No model is given. Pass its directory, or a GGUF file: --model_dir PATH.")
    path = Path(config.model.model_dir).expanduser()
    if path.is_dir():
        try:
            empty = not any(path.iterdir())
        except OSError as error:
            raise ConfigError(f"--model_dir {path}: {error.strerror}; check its permissions.") from error
        if empty:
            raise ConfigError(f"--model_dir {path} is empty; it should hold config.json, a tokenizer and the weights.")
        # "." has a name too, and a link keeps its own
        return Path(os.path.abspath(path))
    if path.is_file():
        if path.suffix == ".gguf":
            return Path(os.path.abspath(path))
        raise ConfigError(f"--model_dir {path} is a file; give the directory that holds it, or a .gguf file.")
    hint = "Check the path."
    if not path.is_absolute() and len(path.parts) == 2:
        hint = f"llmcore downloads nothing; to fetch it: hf download {path} --local-dir {path.name}"
    raise ConfigError(f"--model_dir {path} does not exist. {hint}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "ip6-localhost", "ip6-loopback")


def parse_pin(text: str) -> tuple[str, str]:
    """(op, kernel) of a value of `--kernel`. Raises ConfigError."""
    op, _, kernel = text.partition("=")
    if not (op and kernel):
        raise ConfigError(f"--kernel {text!r} is no pin: it needs the form op=kernel, e.g. rms_norm=torch")
    return op, kernel


def _given(origins: Origins, name: str) -> bool:
    return origins.get(name, "default") != "default"


# --- contradictions --------------------------------------------------------------------------------------------


def _deepspeed(config: Config, origins: Origins) -> str | None:
    if config.model.load_way != "DS":
        return None
    return (
        "--load_way DS: DeepSpeed checkpoints are not read. Convert it once with the zero_to_fp32.py that stands in "
        "the checkpoint: python zero_to_fp32.py CHECKPOINT OUT --safe_serialization, copy config.json and the "
        "tokenizer files to OUT, then serve OUT with --load_way HF."
    )


def _memory(config: Config, origins: Origins) -> str | None:
    memory = config.memory
    if memory.mem_fraction == 0:
        return "--mem_fraction is 0, which leaves no memory; give a share above 0 and up to 1, for instance 0.9."
    longest, prompt, slots = memory.max_req_total_len, memory.max_req_input_len, memory.max_total_token_num
    if longest is not None and prompt is not None and prompt >= longest:
        return (
            f"--max_req_input_len {prompt} leaves no room for an answer within --max_req_total_len {longest}; "
            f"lower it to {longest - 1} or less."
        )
    if longest is not None and slots is not None and slots < longest:
        return (
            f"--max_total_token_num {slots} cannot hold one request of --max_req_total_len {longest} tokens; "
            "raise the first or lower the second."
        )
    return None


def _steps(config: Config, origins: Origins) -> str | None:
    scheduling = config.scheduling
    chunk, batch = scheduling.chunked_prefill_size, scheduling.batch_max_tokens
    if chunk is not None and scheduling.disable_chunked_prefill:
        return "--chunked_prefill_size and --disable_chunked_prefill contradict each other; leave one out."
    if chunk is not None and batch is not None and chunk > batch:
        return (
            f"--chunked_prefill_size {chunk} is above --batch_max_tokens {batch}, the tokens of a whole step; "
            "lower the first or raise the second."
        )
    return None


def _prefix_cache(config: Config, origins: Origins) -> str | None:
    scheduling = config.scheduling
    off, manager = scheduling.disable_dynamic_prompt_cache, scheduling.kv_manager
    if off and _given(origins, "kv_manager") and manager != "none":
        return f"--disable_dynamic_prompt_cache and --kv_manager {manager} contradict each other; leave one out."
    return None


def _estimator(config: Config, origins: Origins) -> str | None:
    ratio, name = config.scheduling.router_token_ratio, config.scheduling.length_estimator
    implied = config.scheduling.estimator
    if name in (None, implied):
        return None
    return f"--router_token_ratio {ratio} stands for --length_estimator {implied}, but {name} is given; leave one out."


def _pins(config: Config, origins: Origins) -> str | None:
    for pin in config.kernels.kernel:
        parse_pin(pin)
    return None


def _kv_share(config: Config, origins: Origins) -> str | None:
    share = config.memory.cache_max_entry_count
    if share is None:
        return None
    if share == 0:
        return (
            "--cache_max_entry_count is 0, which leaves no memory; give a share above 0 and up to 1, for instance 0.8."
        )
    if _given(origins, "mem_fraction"):
        return "--cache_max_entry_count and --mem_fraction both say how much memory KV gets; leave one out."
    return None


def _keys(config: Config, origins: Origins) -> str | None:
    for key in config.access.api_keys:
        if not (key.isascii() and key.isprintable() and " " not in key):
            return f"{origins['api_keys']} holds a key that no header can carry; use ASCII without spaces."
    return None


def _cors(config: Config, origins: Origins) -> str | None:
    if config.access.allow_credentials and "*" in config.access.allow_origins:
        return "--allow_credentials with --allow_origins '*' would let any web page act for its reader; list origins."
    return None


def _hosts(config: Config, origins: Origins) -> str | None:
    for name in config.access.allowed_hosts:
        if name != "*" and not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            origin = origins["allowed_hosts"]
            return f"{origin} holds {name!r}; give a name without scheme or port, e.g. llm.example.com."
    return None


def _tls(config: Config, origins: Origins) -> str | None:
    access = config.access
    if access.ssl and not (access.ssl_certfile and access.ssl_keyfile):
        missing = "--ssl_keyfile" if access.ssl_certfile else "--ssl_certfile"
        return f"--ssl needs {missing}; give the paths of a certificate chain and its key, both PEM."
    return None


def _admin(config: Config, origins: Origins) -> str | None:
    host = config.server.admin_host
    if config.server.disable_admin or is_loopback(host) or config.access.api_keys:
        return None
    return (
        f"--admin_host {host} lets others read the server's settings and figures, and there are no --api_keys; "
        "set some, or keep it on 127.0.0.1."
    )


def _push(config: Config, origins: Origins) -> str | None:
    keys = [label.partition("=")[0] for label in config.reports.grouping_key]
    for label, key in zip(config.reports.grouping_key, keys, strict=True):
        if not (re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", key) and label.partition("=")[2]):
            return f"--grouping_key {label!r} needs the form key=value, e.g. instance=node1"
    if len(set(keys)) < len(keys) or "job" in keys:
        return f"--grouping_key names a key twice, or job, which --job_name says: {', '.join(keys)}."
    return None


_PROBLEMS: tuple[Callable[[Config, Origins], str | None], ...] = (
    _deepspeed,
    _memory,
    _steps,
    _prefix_cache,
    _estimator,
    _pins,
    _kv_share,
    _keys,
    _cors,
    _hosts,
    _tls,
    _admin,
    _push,
)


def _exposed(config: Config) -> Iterator[str]:
    server, access = config.server, config.access
    if access.api_keys and not access.ssl and not is_loopback(server.host):
        yield f"--host {server.host} without --ssl: API keys travel as they are, unless a proxy encrypts them."
    if not server.disable_admin and not is_loopback(server.admin_host):
        yield f"--admin_host {server.admin_host}: API keys travel as they are, unless a proxy encrypts them."


# --- without effect --------------------------------------------------------------------------------------------


def _without_effect(config: Config) -> Iterator[tuple[str, str]]:
    memory, scheduling, server = config.memory, config.scheduling, config.server
    if memory.max_total_token_num is not None:
        for name in ("mem_fraction", "cache_max_entry_count"):
            yield name, "max_total_token_num already says how many tokens fit"
    if not config.access.allow_origins:
        for name in ("allow_methods", "allow_headers", "allow_credentials"):
            yield name, "allow_origins names no origin that may call this server"
    if not server.health_monitor:
        for name in ("restart_pause", "restart_limit"):
            yield name, "without health_monitor a server ends with its engine"
    if not config.access.ssl:
        for name in ("ssl_certfile", "ssl_keyfile"):
            yield name, "ssl is not set"
    if server.disable_admin:
        for name in ("admin_host", "admin_port", "ready_timeout"):
            yield name, "disable_admin is set"
    if config.reports.metric_gateway is None:
        for name in ("job_name", "grouping_key", "push_interval", "enable_monitor_auth"):
            yield name, "metric_gateway names no Pushgateway"
    if config.reports.log_level not in ("DEBUG", "NOTSET"):
        yield "max_log_len", "prompts are logged with log_level DEBUG only"
    if server.disable_log_stats:
        yield "log_stats_interval", "disable_log_stats is set"
    if scheduling.length_estimator == "conservative" or scheduling.router_token_ratio == 0:
        yield "router_max_new_token_len", "nothing is capped when the full max_new_tokens is foreseen"
    if config.kernels.disable_cudagraph:
        yield "graph_max_batch_size", "disable_cudagraph is set"
    if config.model.trust_remote_code and (config.model.model_dir or "").endswith(".gguf"):
        yield "trust_remote_code", "a GGUF file carries no code"
