"""The memory budget, from a model's config and a checkpoint's headers. Arithmetic only: nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmcore.api.models import ModelConfig
from llmcore.api.specs import DeviceInfo, DType
from llmcore.config import Config

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

    `pool`: memory for KV. `kv_tokens`: tokens that fit into it. `longest`: prompt plus answer of one request.
    """

    dtype: DType
    parameters: int
    weights: int
    activations: int
    tables: int
    graphs: int
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


def total_len(config: Config, model: ModelConfig) -> int:
    """`max_req_total_len`, or its default for this model."""
    return config.memory.max_req_total_len or min(DEFAULT_TOTAL_LEN, model.max_position)


def predict(
    model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], config: Config, machine: Machine, kv_token: int
) -> Budget:
    """The budget of `model` with parameters of `shapes` on `machine`.

    `kv_token`: bytes of one token's KV over all groups; `model.dtype`: the type it will run in.
    """
    item = ITEM_BYTES[model.dtype]
    parameters = sum(math.prod(shape) for shape in shapes.values())
    allowed = total_len(config, model)
    activations = _activations(model, shapes, config, machine)
    tables = config.memory.running_max_req_size * allowed * 4
    if machine.kv is not None:
        graphs, usable, pool, limit = 0, machine.memory, machine.kv, "what the device grants"
    else:
        share = config.memory.cache_max_entry_count
        graphs, usable = GRAPH_BYTES, int(machine.memory * (config.memory.mem_fraction if share is None else 1))
        pool = max(0, usable - parameters * item - activations - tables - graphs)
        limit = f"what is left of {usable / machine.memory:.0%} of the memory"
        asked = int((machine.memory - parameters * item) * (1 if share is None else share))
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
        parameters=parameters,
        weights=parameters * item,
        activations=activations,
        tables=tables,
        graphs=graphs,
        memory=machine.memory,
        usable=usable,
        pool=pool,
        kv_token=kv_token,
        kv_tokens=tokens,
        longest=min(allowed, tokens),
        limit=limit,
    )


def _activations(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], config: Config, machine: Machine) -> int:
    """Bytes of a step's intermediate results.

    A token has six rows of the hidden size, and three of the widest projection or its experts' results, whichever is
    larger. A sampled row has its f32 logits twice.
    """
    tokens = config.scheduling.batch_max_tokens or machine.step_tokens
    wide = [shape[0] for shape in shapes.values() if len(shape) == 2 and shape[0] != model.vocab_size]
    widest = max(3 * max(wide, default=4 * model.hidden_size), model.expert_elements)
    hidden = 6 * model.hidden_size + widest
    sampled = min(config.memory.running_max_req_size, tokens)
    return tokens * hidden * ITEM_BYTES[model.dtype] + sampled * model.vocab_size * 4 * 2
