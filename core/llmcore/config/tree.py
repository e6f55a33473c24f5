"""The tree of settings. A field is an option, a YAML key, an environment variable and a row of docs/options.md.

Names are LightLLM's; where LMDeploy has another name for the same meaning it is an alias. `None` means that the
default depends on the model or the device, as the help says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcore.specs import DType, PluginInfo

DATA_TYPES: Mapping[str, DType] = {
    "bf16": "bf16",
    "f16": "f16",
    "f32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "fp16": "f16",
    "float32": "f32",
    "fp32": "f32",
}
"""Values of `--data_type` -> the type: our names first, as specs have them, then those of torch and other servers."""


def option(default: Any, help: str, **more: Any) -> Any:
    """A setting: its default, one line of help, and what `Setting` takes of `aliases`, `choices`, `unit`, `low`,
    `high`, `unset`, `one_word`, `secret`, `login` and `first_page`. A setting with a unit is a count and may be
    written 32k (32,000) or 32K (32,768).
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where the server listens and how its processes talk."""

    host: str = option("127.0.0.1", "Address to listen on.", aliases=("server_name",), first_page=True)
    port: int = option(
        8000, "Port to listen on (0: any free one).", aliases=("server_port",), low=0, high=65535, first_page=True
    )
    httpserver_workers: int = option(
        1, "HTTP worker processes on one shared listening socket.", low=1, high=64, first_page=True
    )
    max_connections: int | None = option(
        None,
        "Most connections of one HTTP worker; further ones get a 503 at once (default: 4096, or 256 beyond "
        "running_max_req_size where that is more).",
        low=1,
    )
    max_connections_per_address: int = option(
        0, "Most of them from one address (0: any number; behind a proxy all have the same).", low=0
    )
    sse_keep_alive: float = option(
        15.0,
        "Seconds of silence in a stream after which it gets a comment, so that proxies do not cut its connection "
        "(0: never).",
        low=0,
    )
    zmq_mode: str = option(
        "ipc:///tmp/", "How processes talk: a private directory, or loopback.", choices=("ipc:///tmp/", "tcp://")
    )
    disable_log_stats: bool = option(False, "Do not log throughput.")
    log_stats_interval: int = option(10, "Seconds between throughput lines.", low=1)
    drain_timeout: float = option(30.0, "Seconds that open requests may go on after SIGTERM.", low=0)
    watchdog_timeout: int = option(
        30,
        "Seconds without a finished step, work pending, until the engine is killed; of silence, until a worker is.",
        low=1,
    )
    admin_host: str = option(
        "127.0.0.1", "Address of the admin listener: health, metrics, dashboard. One that others reach needs api_keys."
    )
    admin_port: int | None = option(
        None, "Its port; 0: any free one (default: port + 1, or any free one where that is taken).", low=0, high=65535
    )
    disable_admin: bool = option(False, "Have no admin listener.")
    ready_timeout: int = option(
        30, "Seconds without a finished step until its /ready says 503; an idle engine is made to do one.", low=1
    )
    health_monitor: bool = option(
        False, "Start a new engine, after a pause, when it has died or hangs; without it the server ends."
    )
    restart_pause: float = option(
        1.0, "Seconds until a dead engine is replaced; doubled by every further death within ten minutes.", low=0
    )
    restart_limit: int = option(
        5, "How often within ten minutes an engine is replaced before the server ends instead (0: always).", low=0
    )


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may connect, and how."""

    api_keys: tuple[str, ...] = option(
        (),
        "Keys of which every request must bring one; only health and readiness stay open. Best kept out of the "
        "command line: in LLMCORE_API_KEYS or the YAML file.",
        secret=True,
        first_page=True,
    )
    allow_origins: tuple[str, ...] = option((), "Origins of web pages that may call this server (CORS); * for any.")
    allow_methods: tuple[str, ...] = option(("*",), "Methods that they may use.")
    allow_headers: tuple[str, ...] = option(("*",), "Headers that they may send.")
    allow_credentials: bool = option(False, "Let them send cookies and the like; not with origin *.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names beside localhost, this machine's own and any address under which clients may call the server, as its "
        "Host header; * for any. Checked where they are given, and on loopback without api_keys.",
    )
    ssl: bool = option(False, "Speak HTTPS; needs ssl_certfile and ssl_keyfile.")
    ssl_certfile: str | None = option(None, "Certificate chain, PEM (or the variable SSL_CERTFILE).")
    ssl_keyfile: str | None = option(None, "Its private key, PEM, without a password (or the variable SSL_KEYFILE).")
    disable_fastapi_docs: bool = option(False, "Do not serve /openapi.json and /docs.")


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What becomes of requests before they reach the engine."""

    beam_mode: bool = option(
        False, "At /generate best_of is the number of beams of a beam search; without it num_beams asks for one."
    )
    token_healing_mode: bool = option(
        False,
        "Make the end of every prompt anew: its last tokens become the beginning of the answer, which is not shown.",
    )
    long_truncation_mode: str | None = option(
        None,
        "Cut a prompt that is too long beside its answer: head drops its beginning, center its middle.",
        choices=("head", "center"),
        unset="None",
    )


@dataclass(frozen=True, kw_only=True)
class Admission:
    """How many requests may wait, and how long they may take. Every answer of a request counts (`n`, beams)."""

    max_waiting_requests: int | None = option(
        None,
        "Most requests that wait for a place; one more is refused with 429 (default: running_max_req_size; 0: any).",
        unit="requests",
        low=0,
    )
    max_waiting_tokens: int | None = option(
        None,
        "Most tokens of prompts that wait; beyond that 429 (default: 4 times the KV slots; 0: any).",
        unit="tokens",
        low=0,
    )
    max_requests_per_key: int | None = option(
        None,
        "Most requests of one API key that wait or run; beyond that 429 (default: with several keys half of what may "
        "wait and run in all; 0: any).",
        unit="requests",
        low=0,
    )
    queue_timeout: float = option(0.0, "Seconds a request may wait before it runs, else 503 (0: any).", low=0)
    first_token_timeout: float = option(
        0.0, "Seconds from a request's arrival to its first token, else 504 (0: any).", low=0
    )
    request_timeout: float = option(
        0.0,
        "Seconds from a request's arrival to its end, else 504, or an error in the stream (0: any). The header "
        "x-request-timeout can only shorten it.",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class Reports:
    """What is logged and pushed."""

    log_level: str = option(
        "INFO",
        "Least severity that is logged; DEBUG logs prompts too.",
        choices=("CRITICAL", "FATAL", "ERROR", "WARN", "WARNING", "INFO", "DEBUG", "NOTSET"),
    )
    log_format: str = option(
        "text", "Lines for people, or one JSON object per line, of every process.", choices=("text", "json")
    )
    max_log_len: int | None = option(
        None, "Most characters and most ids of a prompt in the log (default: all).", low=0
    )
    metric_gateway: str | None = option(
        None, "Address of a Prometheus Pushgateway that figures are pushed to.", login=True
    )
    job_name: str = option("llmcore", "Name of the job under which they are pushed.")
    grouping_key: tuple[str, ...] = option((), "More labels to group them by, key=value.")
    push_interval: int = option(10, "Seconds between two pushes.", low=1)
    enable_monitor_auth: bool = option(
        False, "Log in at the gateway with the variables USERNAME and PASSWORD (HTTP basic auth)."
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model, and how it is loaded."""

    model_dir: str | None = option(None, "Directory of the model, or a GGUF file.", first_page=True)
    model_name: tuple[str, ...] = option(
        (),
        "Name that clients see (default: the directory's); further ones, after a comma, are aliases.",
        one_word=True,
        first_page=True,
    )
    tokenizer_mode: str = option("fast", "Which tokenizer to use.", choices=("fast", "slow", "auto"))
    tool_call_parser: str | None = option(
        None, "How the model writes tool calls: a parser, none, or auto, which asks the chat template (default: auto)."
    )
    reasoning_parser: str | None = option(
        None, "How the model marks what it thinks before it answers: a parser, none, or auto (default: auto)."
    )
    load_way: str = option("HF", "Layout of the checkpoint.", choices=("HF", "DS"))
    load_format: str = option("auto", "`dummy` draws random weights from the config alone.", choices=("auto", "dummy"))
    data_type: str | None = option(
        None,
        "Type of weights and KV (default: the checkpoint's).",
        aliases=("dtype",),
        choices=tuple(DATA_TYPES),
        unset="auto",
        first_page=True,
    )
    rope_scaling_factor: float = option(
        0.0,
        "Above 0: stretch rotary positions by this factor as prompts grow (dynamic NTK), up to max_req_total_len.",
        low=0,
    )
    chat_template: str | None = option(
        None,
        "How conversations are written: a tool parser's name, for its generic template with tools; a Jinja file; or "
        "LMDeploy's JSON, as a file or as text.",
    )
    generation_config: str = option(
        "auto", "Sampling defaults: auto (the model's), none (each API's own), or a generation_config.json."
    )
    trust_remote_code: bool = option(False, "Allow code from the model directory when its tokenizer is converted.")
    eos_id: tuple[int, ...] = option(
        (),
        "Token ids that end an answer (default: those of the model's config.json and generation_config.json).",
        low=0,
    )
    device: str = option(
        "auto", "Device to run on: auto, or the name of one that `llmcore env` lists.", first_page=True
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """How much fits."""

    max_total_token_num: int | None = option(
        None, "KV slots, in tokens (default: what fits).", unit="tokens", low=1, first_page=True
    )
    mem_fraction: float = option(
        0.9, "Share of the accelerator's memory to use, above 0.", low=0, high=1, first_page=True
    )
    cache_max_entry_count: float | None = option(
        None, "Share for KV of what the weights leave free, above 0; instead of mem_fraction.", low=0, high=1
    )
    cache_block_seq_len: int | None = option(
        None, "Tokens of a KV granule (default: the smallest that the kernels take).", unit="tokens", low=1
    )
    running_max_req_size: int = option(
        1000, "Most requests running at once.", aliases=("max_batch_size",), unit="requests", low=1
    )
    max_req_input_len: int | None = option(
        None, "Longest prompt, in tokens (default: max_req_total_len - 1).", unit="tokens", low=1
    )
    max_req_total_len: int | None = option(
        None,
        "Longest prompt plus answer, in tokens (default: the model's maximum, at most 16384).",
        aliases=("session_len",),
        unit="tokens",
        low=2,
        first_page=True,
    )


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """What runs in a step."""

    batch_max_tokens: int | None = option(
        None,
        "Tokens of one step (default: 8192 on a GPU, 2048 on a CPU).",
        aliases=("num_tokens_per_iter",),
        unit="tokens",
        low=1,
        unset="0",
    )
    chunked_prefill_size: int | None = option(
        None,
        "Most prompt tokens of one request in a step (default: batch_max_tokens).",
        aliases=("max_prefill_token_num", "splitfuse_block_size"),
        unit="tokens",
        low=1,
    )
    prefill_stall_ms: float | None = option(
        None,
        "Milliseconds of prompts in a step while answers wait for their next token; more when over 16 prompts wait "
        "(default: 20 on a GPU, 0 on a CPU; 0: up to batch_max_tokens).",
        low=0,
    )
    disable_chunked_prefill: bool = option(False, "Compute every prompt in one step.")
    disable_dynamic_prompt_cache: bool = option(False, "Do not keep and reuse the KV of common prefixes.")
    scheduler: str = option("fcfs", "Scheduling policy: fcfs, priority, or a plugin's.")
    kv_manager: str = option("radix", "Prefix-cache policy.")
    length_estimator: str | None = option(
        None, "How answers' lengths are foreseen: past_future (default), capped, conservative."
    )
    router_token_ratio: float | None = option(
        None,
        "Below this share of slots in use, foresee capped lengths; above it, and with 0, the full max_new_tokens.",
        low=0,
        high=1,
    )
    router_max_new_token_len: int = option(1024, "Cap of a foreseen answer, in tokens.", unit="tokens", low=1)
    router_max_wait_tokens: int = option(0, "New requests join every n-th step (0: any step).", low=0)

    @property
    def estimator(self) -> str:
        """The length estimator that is asked for: a ratio of 0 means `conservative`, one above it `capped`."""
        if self.router_token_ratio is None:
            return self.length_estimator or "past_future"
        return "capped" if self.router_token_ratio > 0 else "conservative"


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which implementations."""

    mode: tuple[str, ...] = option((), "Modes: bundles of layout, kernels and quantization, by name.")
    kernel: tuple[str, ...] = option((), "Pins, op=kernel.")
    deterministic: bool = option(False, "A request's greedy answer has the same bits alone and in any batch; slower.")
    disable_cudagraph: bool = option(
        False, "Launch every kernel of a step by itself instead of replaying captured steps.", aliases=("eager_mode",)
    )
    graph_max_batch_size: int = option(
        256, "Most requests of a decode step that is captured; larger steps are launched.", unit="requests", low=1
    )


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """Who takes part."""

    plugins: tuple[str, ...] | None = option(
        None,
        "Plugins to load, in order of preference; -name leaves one out, distribution:name takes the place of another "
        "of that name (default: all installed).",
        first_page=True,
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one server, and what was discovered when it started."""

    server: Server = Server()
    access: Access = Access()
    requests: Requests = Requests()
    admission: Admission = Admission()
    reports: Reports = Reports()
    model: Model = Model()
    memory: Memory = Memory()
    scheduling: Scheduling = Scheduling()
    kernels: Kernels = Kernels()
    plugins: Plugins = Plugins()
    plugin_options: Mapping[str, Any] = field(default_factory=dict)
    discovered: tuple[PluginInfo, ...] = ()

    def __post_init__(self) -> None:
        # A config that came from another process has lists where tuples were.
        brought = {k: tuple(v) if isinstance(v, list) else v for k, v in self.plugin_options.items()}
        object.__setattr__(self, "plugin_options", brought)
