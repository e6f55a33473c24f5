"""Settings that contradict each other, and settings without effect."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmcore.api.errors import ConfigError
from llmcore.config.tree import Config

Origins = Mapping[str, str]
"""Setting name -> the origin of its value: "default", `--port`, `LLMCORE_PORT` or `port in server.yaml`."""


def check_config(config: Config, origins: Origins, sections: Iterable[type]) -> list[str]:
    """A warning for each setting that has no effect or is a risk. Raises ConfigError for the first contradiction.

    `sections`: the dataclasses of plugins' settings. One that has a method `check(config, origins)` is asked too; it
    returns such sentences, or None.
    """
    for contradiction in _contradictions(config, origins):
        raise ConfigError(contradiction)
    warnings = [text for names, why in _idle(config) for text in without_effect(origins, names, why)]
    for kind in sections:
        section: Any = config.section(kind)
        if hasattr(section, "check"):
            warnings += section.check(config, origins) or ()
    return warnings


def resolve_model(name: str) -> Path | None:
    """The absolute path of the directory or GGUF file that `--model_dir` names. None if there is no such path.

    Raises ConfigError with the fix for a path that holds no model.
    """
    path = Path(name).expanduser()
    if not path.exists():
        return None
    if path.is_dir():
        try:
            empty = not any(path.iterdir())
        except OSError as error:
            raise ConfigError(f"--model_dir {path}: {error.strerror}; check its permissions.") from error
        if empty:
            raise ConfigError(f"--model_dir {path} is empty; it should hold config.json, a tokenizer and the weights.")
    elif path.suffix != ".gguf":
        raise ConfigError(f"--model_dir {path} is a file; give the directory that holds it, or a .gguf file.")
    # Not resolve(): "." gets the directory's name, and a link keeps its own.
    return Path(os.path.abspath(path))


def parse_pin(text: str) -> tuple[str, str]:
    """(op, kernel) of a value of `--kernel`. Raises ConfigError."""
    op, _, kernel = text.partition("=")
    if not (op and kernel):
        raise ConfigError(f"--kernel {text!r} is no pin: it needs the form op=kernel, e.g. rms_norm=torch")
    return op, kernel


def _given(origins: Origins, name: str) -> bool:
    return origins.get(name, "default") != "default"


# --- contradictions --------------------------------------------------------------------------------------------


def _contradictions(config: Config, origins: Origins) -> Iterator[str]:
    memory, scheduling = config.memory, config.scheduling
    if config.model.load_way == "DS":
        yield (
            "--load_way DS: DeepSpeed checkpoints are not read. Convert it once with the zero_to_fp32.py that stands "
            "in the checkpoint: python zero_to_fp32.py CHECKPOINT OUT --safe_serialization, copy config.json and the "
            "tokenizer files to OUT, then serve OUT with --load_way HF."
        )
    if config.model.tp % config.model.dp:
        works = ", ".join(str(n) for n in range(1, config.model.tp + 1) if config.model.tp % n == 0)
        yield (
            f"--tp {config.model.tp} processes cannot be divided among --dp {config.model.dp} engines; with this tp, "
            f"dp can be {works}; without --tp, each engine has one process."
        )
    if memory.mem_fraction == 0:
        yield "--mem_fraction is 0, which leaves no memory; give a share above 0 and up to 1, for instance 0.9."
    longest, prompt, slots = memory.max_req_total_len, memory.max_req_input_len, memory.max_total_token_num
    if longest is not None and prompt is not None and prompt >= longest:
        yield (
            f"--max_req_input_len {prompt} leaves no room for an answer within --max_req_total_len {longest}; "
            f"lower it to {longest - 1} or less."
        )
    if longest is not None and slots is not None and slots < longest:
        yield (
            f"--max_total_token_num {slots} cannot hold one request of --max_req_total_len {longest} tokens; "
            "raise the first or lower the second."
        )
    chunk, batch, manager = scheduling.chunked_prefill_size, scheduling.batch_max_tokens, scheduling.kv_manager
    if chunk is not None and scheduling.disable_chunked_prefill:
        yield "--chunked_prefill_size and --disable_chunked_prefill contradict each other; leave one out."
    if chunk is not None and batch is not None and chunk > batch:
        yield (
            f"--chunked_prefill_size {chunk} is above --batch_max_tokens {batch}, the tokens of a whole step; "
            "lower the first or raise the second."
        )
    if scheduling.disable_dynamic_prompt_cache and _given(origins, "kv_manager") and manager != "none":
        yield f"--disable_dynamic_prompt_cache and --kv_manager {manager} contradict each other; leave one out."
    name, implied = scheduling.length_estimator, scheduling.estimator
    if name not in (None, implied):
        yield (
            f"--router_token_ratio {scheduling.router_token_ratio} stands for --length_estimator {implied}, but "
            f"{name} is given; leave one out."
        )
    for pin in config.kernels.kernel:
        parse_pin(pin)
    share = memory.cache_max_entry_count
    if share == 0:
        yield (
            "--cache_max_entry_count is 0, which leaves no memory; give a share above 0 and up to 1, for instance 0.8."
        )
    if share is not None and _given(origins, "mem_fraction"):
        yield "--cache_max_entry_count and --mem_fraction both say how much memory KV gets; leave one out."


# --- without effect --------------------------------------------------------------------------------------------


def without_effect(origins: Origins, names: Iterable[str], why: str) -> Iterator[str]:
    """A warning for each setting in `names` that was given."""
    for name in names:
        if _given(origins, name):
            yield f"{origins[name]} has no effect: {why}."


def _idle(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    memory, scheduling = config.memory, config.scheduling
    if memory.max_total_token_num is not None:
        yield ("mem_fraction", "cache_max_entry_count"), "max_total_token_num already says how many tokens fit"
    if scheduling.length_estimator == "conservative" or scheduling.router_token_ratio == 0:
        yield ("router_max_new_token_len",), "nothing is capped when the full max_new_tokens is foreseen"
    if config.model.ranks == 1:
        yield ("rank_timeout",), "an engine has one process, which waits for none"
    if config.kernels.disable_cudagraph:
        yield ("graph_max_batch_size",), "disable_cudagraph is set"
    if config.model.trust_remote_code and (config.model.model_dir or "").endswith(".gguf"):
        yield ("trust_remote_code",), "a GGUF file carries no code"
