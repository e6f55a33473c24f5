"""The memory: a predicted budget, the scheduler's limits, the KV capacity, the errors of a start that has too little.

A prediction reads a model's config and a checkpoint's headers. Nothing is allocated here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmcore.api.errors import ConfigError
from llmcore.api.models import ModelConfig
from llmcore.api.protocols import Device, SchedulerLimits
from llmcore.api.specs import DeviceInfo, DType
from llmcore.config import Config, Memory
from llmcore.config.process import memory_note

if TYPE_CHECKING:
    from llmcore.layers.layout import Layout
    from llmcore.weights.load import Weighed

log = logging.getLogger(__name__)

ITEM_BYTES: Mapping[DType, int] = {"f32": 4, "f16": 2, "bf16": 2}
GRAPH_BYTES = 256 << 20
"""Reserve for captured graphs."""
DEFAULT_TOTAL_LEN = 16384


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about a device that a prediction needs.

    `kv`: bytes that KV may take. None: the part of `memory` that the model leaves.
    """

    info: DeviceInfo
    memory: int
    step_tokens: int
    kv: int | None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A prediction. Sizes in bytes, lengths in tokens.

    `buffers`: for exchanges between ranks. `pool`: memory for KV. `kv_tokens`: tokens that fit into it. `longest`:
    prompt plus answer of one request.
    """

    dtype: DType
    parameters: int
    weights: int
    activations: int
    tables: int
    graphs: int
    buffers: int
    memory: int
    usable: int
    pool: int
    kv_token: int
    kv_tokens: int
    longest: int
    limit: str

    @property
    def fits(self) -> bool:
        """True if the longest request that the settings allow can be served."""
        return self.longest > 0 and self.kv_tokens >= self.longest

    @property
    def bits_per_weight(self) -> float:
        """Over all parameters, plain ones included."""
        return 8 * self.weights / self.parameters


def total_len(config: Config, model: ModelConfig) -> int:
    """`max_req_total_len`, or its default for this model."""
    return config.memory.max_req_total_len or min(DEFAULT_TOTAL_LEN, model.max_position)


def predict(
    model: ModelConfig, weights: Weighed, config: Config, machine: Machine, kv_token: int, buffers: int = 0
) -> Budget:
    """The budget of `model` with the parameters `weights` on `machine`.

    `kv_token`: bytes of one token's KV over all groups; `model.dtype`: the type it will run in. `buffers`: bytes that
    kernels keep for exchanges between ranks.
    """
    allowed = total_len(config, model)
    activations = _activations(model, weights.rows, config, machine)
    tables = config.memory.running_max_req_size * allowed * 4
    if machine.kv is not None:
        graphs, usable, pool, limit = 0, machine.memory, machine.kv, "what the device grants"
    else:
        share = config.memory.cache_max_entry_count
        graphs, usable = GRAPH_BYTES, int(machine.memory * (config.memory.mem_fraction if share is None else 1))
        pool = max(0, usable - weights.bytes - activations - tables - graphs - buffers)
        limit = f"what is left of {usable / machine.memory:.0%} of the memory"
        asked = int((machine.memory - weights.bytes) * (1 if share is None else share))
        if share is not None and asked < pool:
            pool, limit = max(0, asked), f"{share:.0%} of what the weights leave"
    most = config.memory.running_max_req_size * allowed
    tokens = pool // kv_token
    if tokens > most:
        tokens, pool, limit = most, most * kv_token, "what running_max_req_size requests can hold"
    if config.memory.max_total_token_num is not None:
        tokens, limit = config.memory.max_total_token_num, "max_total_token_num"
        pool = tokens * kv_token
    return Budget(
        dtype=model.dtype,
        parameters=weights.parameters,
        weights=weights.bytes,
        activations=activations,
        tables=tables,
        graphs=graphs,
        buffers=buffers,
        memory=machine.memory,
        usable=usable,
        pool=pool,
        kv_token=kv_token,
        kv_tokens=tokens,
        longest=min(allowed, tokens),
        limit=limit,
    )


def _activations(model: ModelConfig, rows: Collection[int], config: Config, machine: Machine) -> int:
    """Bytes of a step's intermediate results.

    A token has six rows of the hidden size, and three of the widest projection or its experts' results, whichever is
    larger. A sampled row has its f32 logits twice.
    """
    tokens = config.scheduling.batch_max_tokens or machine.step_tokens
    wide = [count for count in rows if count != model.vocab_size]
    widest = max(3 * max(wide, default=4 * model.hidden_size), model.expert_elements)
    hidden = 6 * model.hidden_size + widest
    sampled = min(config.memory.running_max_req_size, tokens)
    return tokens * hidden * ITEM_BYTES[model.dtype] + sampled * model.vocab_size * 4 * 2


LEAST_KV, MOST_KV = 2, (1 << 31) - (1 << 16)
"""Tokens. Slots are int32, and some beyond the last one are for padding."""


def scheduler_limits(config: Config, model: ModelConfig, device: Device) -> SchedulerLimits:
    """Limits before it is known what fits. Raises ConfigError where settings and model contradict each other."""
    memory, scheduling = config.memory, config.scheduling
    total = total_len(config, model)
    if total > model.max_position:
        raise ConfigError(
            f"--max_req_total_len {total} is more than the {model.max_position} positions of this model; lower it, or "
            "give the model's config a rope scaling that covers it"
        )
    longest_input = memory.max_req_input_len or total - 1
    if longest_input >= total:
        raise ConfigError(
            f"--max_req_input_len {longest_input} leaves no room for an answer within {total} tokens; "
            f"lower it to {total - 1} or less"
        )
    batch = scheduling.batch_max_tokens or device.step_tokens
    chunk = scheduling.chunked_prefill_size or batch
    if chunk > batch:
        raise ConfigError(
            f"--chunked_prefill_size {chunk} is above the {batch} tokens of a step; lower it, or raise "
            "--batch_max_tokens"
        )
    if scheduling.disable_chunked_prefill and scheduling.prefill_stall_ms:
        raise ConfigError(
            f"--prefill_stall_ms {scheduling.prefill_stall_ms:g} cuts long prompts in pieces and "
            "--disable_chunked_prefill forbids that; drop one of them"
        )
    return SchedulerLimits(
        max_running=memory.running_max_req_size,
        max_input_len=longest_input,
        max_total_len=total,
        batch_tokens=batch,
        chunk_tokens=chunk,
        wait_steps=scheduling.router_max_wait_tokens,
        token_ratio=scheduling.router_token_ratio,
        capped_new_tokens=scheduling.router_max_new_token_len,
        chunked=not scheduling.disable_chunked_prefill,
    )


def stall_ms(config: Config, device: Device) -> float:
    """Milliseconds of prompts in a step while answers wait for their next token; 0.0: any."""
    scheduling = config.scheduling
    if scheduling.disable_chunked_prefill:
        return 0.0
    return device.prefill_stall_ms if scheduling.prefill_stall_ms is None else scheduling.prefill_stall_ms


def token_bytes(layouts: Iterable[Layout]) -> int:
    """KV of one token over all groups, rounded up."""
    return sum(-(-layout.bytes // layout.granule) for layout in layouts)


def kv_room(config: Config, device: Device, token_bytes: int, graphs: int = 0, left: int = 0) -> int:
    """Compute the KV capacity that the device grants, in tokens.

    `token_bytes`: KV of one token. On a device that is measured, `graphs` bytes are kept for captured steps, and
    `left` bytes were free when the weights had been loaded.
    """
    share = config.memory.cache_max_entry_count if device.measured else None
    budget = device.kv_budget(config.memory.mem_fraction if share is None else 1.0)
    budget -= graphs if device.measured else 0
    if share is not None:
        budget = min(budget, int(left * share))
    return max(budget, 0) // token_bytes


def kv_capacity(config: Config, limits: SchedulerLimits, device: Device, room: int, token_bytes: int) -> int:
    """The KV capacity in tokens: what the operator asked for, else the `room` that `kv_room` found."""
    asked = config.memory.max_total_token_num
    if asked is not None:
        if not LEAST_KV <= asked <= MOST_KV:
            raise ConfigError(
                f"--max_total_token_num {asked} is not between {LEAST_KV}, a prompt and an answer of one token each, "
                f"and {MOST_KV}, the slots that can be numbered"
            )
        return asked
    for name in ("mem_fraction", "cache_max_entry_count") if not device.measured else ():
        if getattr(config.memory, name) != getattr(Memory, name):
            log.warning("--%s has no effect: on %s KV takes what the device grants.", name, device.info.type)
    if room < LEAST_KV:
        raise ConfigError(
            f"no memory is left for KV: there is room for {room} tokens of {token_bytes} bytes, and the "
            "shortest request has 2; use a smaller model or --data_type, lower --batch_max_tokens or "
            "--running_max_req_size, raise --mem_fraction, or end what else holds the memory"
        )
    # more than every running request could fill would never be used
    return min(room, limits.max_running * limits.max_total_len, MOST_KV)


def fit(config: Config, limits: SchedulerLimits, kv_tokens: int) -> SchedulerLimits:
    """Limits cut to what fits; ConfigError where the operator asked for longer requests than that."""
    if limits.max_total_len <= kv_tokens:
        return limits
    asked = config.memory.max_req_total_len
    if asked is not None:
        raise ConfigError(
            f"--max_req_total_len {asked} does not fit: there is room for {kv_tokens} tokens of KV; lower it to "
            f"{kv_tokens}, or make room (--max_total_token_num, --mem_fraction, --data_type)"
        )
    asked_input = config.memory.max_req_input_len
    if asked_input is not None and asked_input >= kv_tokens:
        raise ConfigError(
            f"--max_req_input_len {asked_input} does not fit: there is room for {kv_tokens} tokens of KV; lower it to "
            f"{kv_tokens - 1}, or make room (--max_total_token_num, --mem_fraction, --data_type)"
        )
    if config.memory.max_total_token_num is None:
        log.warning(
            "requests may have %d tokens instead of %d: there is no room for more KV", kv_tokens, limits.max_total_len
        )
    return replace(limits, max_total_len=kv_tokens, max_input_len=min(limits.max_input_len, kv_tokens - 1))


def weights_short(device: Device, known: str) -> ConfigError:
    """The weights are more than there is; `known`: the `figures`."""
    where = f"the {mib(device.info.memory)} of {device.info.name or device.info.type}"
    return ConfigError(
        f"the weights do not fit into {where}; take a smaller model or --data_type, or end what else holds its "
        f"memory; `llmcore plan` predicts what fits where\n{known}"
    )


def step_short(error: BaseException, known: str) -> ConfigError:
    """The largest step is more than the weights leave; `known`: the `figures`."""
    return ConfigError(
        f"the largest step does not fit beside the weights ({_first_line(error)}); lower --batch_max_tokens, "
        f"--running_max_req_size or --max_req_total_len, or take a smaller model\n{known}"
    )


def kv_short(
    error: BaseException, config: Config, kv_tokens: int, room: int, token_bytes: int, known: str
) -> ConfigError:
    """A pool of `kv_tokens`, or the largest step beside it, is more than there is; `room`: tokens that would fit."""
    if config.memory.max_total_token_num is None or kv_tokens <= room:
        return ConfigError(
            f"the largest step does not fit beside the weights and {kv_tokens:,} tokens of KV "
            f"({_first_line(error)}); lower --mem_fraction, --batch_max_tokens or --running_max_req_size\n{known}"
        )
    way = f"lower it to {room} or less, or leave it out" if room >= 2 else "there is none: take a smaller model"
    return ConfigError(
        f"--max_total_token_num {kv_tokens} does not fit: KV of {mib(kv_tokens * token_bytes)}, where --mem_fraction "
        f"{config.memory.mem_fraction} leaves room for {room} tokens ({_first_line(error)}); {way}\n{known}"
    )


def tables_short(error: BaseException, config: Config, max_total_len: int) -> ConfigError:
    """The tables of running requests are more than there is."""
    return ConfigError(
        f"the tables for {config.memory.running_max_req_size} requests of {max_total_len} tokens do not fit beside "
        f"the weights ({_first_line(error)}); lower --running_max_req_size or --max_req_total_len"
    )


def figures(budget: Budget, device: Device, free: int) -> str:
    """Two lines: what was predicted, and what was measured; `free`: bytes free before anything was loaded."""
    parts = (budget.weights, budget.activations, budget.tables, budget.graphs, budget.buffers)
    weights, step, tables, graphs, buffers = map(mib, parts)
    between = f", buffers between ranks {buffers}" if budget.buffers else ""
    return (
        f"predicted: weights {weights}, a step {step}, tables {tables}, graphs {graphs}{between}, which leaves KV "
        f"{mib(budget.pool)} for {budget.kv_tokens:,} tokens\n"
        f"measured: {mib(free)} of {mib(device.info.memory)} free before the start, at most "
        f"{mib(device.peak_memory())} in use by llmcore since"
    )


def mib(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 2**20:,.0f} MiB"


def _first_line(error: BaseException) -> str:
    line = str(error).partition("\n")[0].rstrip(". ") or type(error).__name__
    return line + memory_note()
