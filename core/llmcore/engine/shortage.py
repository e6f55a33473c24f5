"""What is said where memory is short: what was predicted, what was measured, and what would fit."""

from __future__ import annotations

import torch

from llmcore.budget import Budget, Machine, predict
from llmcore.config import Config
from llmcore.engine.explain import dry_model
from llmcore.errors import ConfigError
from llmcore.machine import memory_note
from llmcore.modes import apply_modes
from llmcore.protocols import Device
from llmcore.registry import Registry
from llmcore.weights.load import stored_shapes
from llmcore.weights.quant import find_quantization
from llmcore.weights.source import open_checkpoint
from llmcore.weights.stretch import read_model_as_set

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


def weights_short(config: Config, registry: Registry, device: Device, machine: Machine, free: int) -> ConfigError:
    """The weights are more than there is; `free`: bytes that were free before anything was loaded."""
    budget = _predicted(config, registry, device, machine)
    return ConfigError(
        f"the weights do not fit into {_name(device)}; take a smaller model or --data_type, or end what else holds "
        f"its memory; `llmcore plan` predicts what fits where\n{figures(budget, device, free)}"
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
    parts = (budget.weights, budget.activations, budget.tables, budget.graphs)
    weights, step, tables, graphs = map(mib, parts)
    return (
        f"predicted: weights {weights}, a step {step}, tables {tables}, graphs {graphs}, which leaves KV "
        f"{mib(budget.pool)} for {budget.kv_tokens:,} tokens\n"
        f"measured: {mib(free)} of {mib(device.info.memory)} free before the start, at most "
        f"{mib(device.peak_memory())} in use by llmcore since"
    )


def mib(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 2**20:,.0f} MiB"


def _predicted(config: Config, registry: Registry, device: Device, machine: Machine) -> Budget:
    checkpoint = open_checkpoint(registry, config.model.path, weights=False)
    family, model = read_model_as_set(registry, checkpoint.config(), config)
    pins = apply_modes(config.kernels.mode, registry, device.info, config.kernels.kernel)
    quantized = find_quantization(registry, checkpoint.config(), model, pins.quant)
    dry, build = dry_model(family, model, registry, device.info, pins, config.kernels.deterministic, quantized)
    layouts = [build.layout(group.name) for group in model.kv_groups]
    return predict(
        model, stored_shapes(dry), config, machine, sum(-(-layout.bytes // layout.granule) for layout in layouts)
    )


def _name(device: Device) -> str:
    return f"the {mib(device.info.memory)} of {device.info.name or device.info.type}"


def _first_line(error: BaseException) -> str:
    line = str(error).partition("\n")[0].rstrip(". ") or type(error).__name__
    return line + memory_note()
