"""What will fit, from a model's config and a checkpoint's headers alone. Arithmetic only; nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmcore.config import Config
from llmcore.specs import DeviceInfo, DType, ModelConfig

ITEM_BYTES: Mapping[DType, int] = {"f32": 4, "f16": 2, "bf16": 2}
CPU_POOL_BYTES = 4 << 30
"""Most KV memory that is taken on a CPU without being asked for."""
GRAPH_BYTES = 256 << 20
"""Reserve for captured graphs."""
DEFAULT_TOTAL_LEN = 16384
STEP_TOKENS = {"cpu": 2048}
"""Tokens of one step by kind of device where `batch_max_tokens` is not given; any other kind gets 8192."""


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
        """Whether the longest request the settings allow can be served."""
        return self.longest > 0 and self.kv_tokens >= self.longest


def total_len(config: Config, model: ModelConfig) -> int:
    """`max_req_total_len`, or its default for this model."""
    return config.memory.max_req_total_len or min(DEFAULT_TOTAL_LEN, model.max_position)


def step_tokens(config: Config, device: str) -> int:
    """`batch_max_tokens`, or its default for this kind of device."""
    return config.scheduling.batch_max_tokens or STEP_TOKENS.get(device, 8192)


def predict(
    model: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    config: Config,
    device: DeviceInfo,
    kv_token: int,
) -> Budget:
    """The budget of `model` with parameters of `shapes` on `device` (its `memory`: all of it; on a CPU what is free).

    `kv_token`: bytes of one token's KV over all groups; `model.dtype`: the type it will run in.
    """
    item = ITEM_BYTES[model.dtype]
    parameters = sum(math.prod(shape) for shape in shapes.values())
    allowed = total_len(config, model)
    cpu = device.type == "cpu"
    activations = _activations(model, shapes, config, device.type)
    tables = config.memory.running_max_req_size * allowed * 4
    graphs = 0 if cpu else GRAPH_BYTES
    usable = device.memory if cpu else int(device.memory * config.memory.mem_fraction)
    if cpu:
        pool, limit = min(CPU_POOL_BYTES, device.memory // 4), "the smaller of 4 GiB and a quarter of the free memory"
    else:
        pool = max(0, usable - parameters * item - activations - tables - graphs)
        limit = f"what is left of {config.memory.mem_fraction:.0%} of the memory"
    tokens = pool // kv_token
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
        memory=device.memory,
        usable=usable,
        pool=pool,
        kv_token=kv_token,
        kv_tokens=tokens,
        longest=min(allowed, tokens),
        limit=limit,
    )


def _activations(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], config: Config, device: str) -> int:
    """A step's intermediate results: six rows of the hidden size and three of the widest projection per token, and
    float32 logits, twice, for every sampled row."""
    tokens = step_tokens(config, device)
    wide = [shape[0] for shape in shapes.values() if len(shape) == 2 and shape[0] != model.vocab_size]
    hidden = 6 * model.hidden_size + 3 * max(wide, default=4 * model.hidden_size)
    sampled = min(config.memory.running_max_req_size, tokens)
    return tokens * hidden * ITEM_BYTES[model.dtype] + sampled * model.vocab_size * 4 * 2
