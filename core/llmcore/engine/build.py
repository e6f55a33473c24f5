"""From settings to an engine: device, model, what fits, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmcore.api.bridge import ModelFacts
from llmcore.api.errors import ConfigError
from llmcore.api.models import ModelReport
from llmcore.api.protocols import Device
from llmcore.api.specs import KVManagerSpec, LengthEstimatorSpec, SchedulerSpec
from llmcore.config import Config, Kernels
from llmcore.engine.blueprint import fallbacks
from llmcore.engine.engine import OUT_OF_MEMORY, Engine
from llmcore.engine.leader import Alone, Ranks, Runner
from llmcore.engine.memory import (
    GRAPH_BYTES,
    Budget,
    fit,
    kv_capacity,
    kv_room,
    kv_short,
    stall_ms,
    step_short,
)
from llmcore.engine.model import Loaded, Progress, describe_sampling
from llmcore.engine.parts import Parts, fingerprint_of, load_parts, ready_of, silent, tables_of
from llmcore.engine.processors import processors_of
from llmcore.engine.profile import measure, run_worst_case, take_workspaces, tokens_within, warm_up
from llmcore.engine.upload import Tables
from llmcore.kv.space import KVGroup
from llmcore.registry.loader import Made, made
from llmcore.registry.official import kernels_that_help
from llmcore.registry.registry import Registry
from llmcore.sched.policy import GuardedEstimator, GuardedManager
from llmcore.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)


def build_engine(
    config: Config,
    registry: Registry,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    index: int | None = None,
) -> Engine:
    """Everything that takes time at a start; tells `progress` how far it is. Raises ConfigError.

    `on_model_built` is called before it returns. `ranks`: the others of its group, which must be started; None if it
    has none. `index`: the number of its device, if it may be one engine of several. Raises RankLost for one of the
    ranks that fails.
    """
    ranks = ranks or Alone()
    started = time.monotonic()
    for kind, name in _policies(config):  # before anything takes long
        registry.find(kind, name)
    if config.model.dp > 1 and index is None:
        raise ConfigError(f"--dp {config.model.dp} needs engines that `llmcore serve` starts; leave it out")
    if config.model.ranks != ranks.mesh.size("attn_tp"):
        raise ConfigError(f"--tp {config.model.tp} needs processes that `llmcore serve` starts; leave it out")
    parts = load_parts(config, registry, progress or silent, index or 0, ranks.mesh)
    device, loaded = parts.device, parts.loaded
    read = time.monotonic()
    ranks.join(ready_of(parts, 0))
    ranks.begin(parts.limits)
    runner, kv_tokens = _runner(parts, tables_of(parts), ranks)
    stall = _stall(parts, runner)
    ranks.set_limit(config.model.rank_timeout)
    slow = (*fallbacks(registry, loaded.build.resolutions), *kernels_that_help(device.info))
    for line in (*slow, *_without_effect(config, device)):
        logger.warning(line)
    scheduler = _scheduler(parts, kv_tokens, runner.graph_rows)
    fingerprint = fingerprint_of(parts)
    report = ModelReport(
        config=loaded.config,
        kernels=loaded.build.chosen(),
        weight_bytes=loaded.weights.bytes,
        kv_tokens=kv_tokens,
        fingerprint=fingerprint,
    )
    registry.call("on_model_built", report=report)
    timings = {"model loaded in": read - started, "ready in": time.monotonic() - started}
    budget = parts.budget
    facts = ModelFacts(
        architecture=loaded.config.architecture,
        vocab_size=loaded.config.vocab_size,
        max_input_len=scheduler.limits.max_input_len,
        max_total_len=scheduler.limits.max_total_len,
        kv_tokens=kv_tokens,
        max_running=scheduler.limits.max_running,
        eos_ids=loaded.config.eos_ids,
        generation=loaded.generation,
        scores=loaded.config.scores,
        embedding_size=loaded.config.hidden_size if hasattr(loaded.model, "normed") else 0,
        fingerprint=fingerprint,
        parameters=budget.parameters,
        weights=loaded.quant or str(loaded.config.dtype),
        weight_bytes=loaded.weights.bytes,
        device=device.info.type,
        report=(
            *summary(loaded, device, budget, timings),
            *((("revision", config.revision),) if config.revision else ()),
            ("sampling", describe_sampling(config.model.generation_config, loaded.generation)),
            *stall,
            ("predicted", memory_text(budget.weights, budget.pool, budget.kv_tokens)),
            ("measured", memory_text(loaded.weights.bytes, kv_tokens * parts.token_bytes, kv_tokens)),
        ),
    )
    processors = processors_of(config, registry, loaded.config)
    fixed, salt = loaded.config.fixed_angles_up_to, "/".join((*parts.identities, config.revision)).encode()
    return Engine(scheduler, runner, device, facts, processors, fixed, salt)


def _without_effect(config: Config, device: Device) -> list[str]:
    """Warnings for settings of captured steps on a device that captures none."""
    names = ("disable_cudagraph", "graph_max_batch_size") if not device.graphs else ()
    said = [name for name in names if getattr(config.kernels, name) != getattr(Kernels, name)]
    return [f"--{name} has no effect: steps on {device.info.type} are never captured." for name in said]


def _runner(parts: Parts, tables: Tables, ranks: Ranks) -> tuple[Runner, int]:
    """The runner and its tokens of KV; the limits are cut to them.

    The memory of the largest steps and of their graphs is measured with next to no KV. KV then gets the rest. The
    largest step runs once more beside it, then small ones to warm up. Raises ConfigError if this does not fit.
    """
    device = parts.device
    take_workspaces(parts.loaded.model.attention_kernels, parts.limits)
    graphs = GRAPH_BYTES + (_measured(parts, tables, ranks) if device.measured else 0)
    room = ranks.least("kv_room", kv_room(parts.config, device, parts.token_bytes, graphs, parts.left), graphs)
    try:
        kv_tokens = kv_capacity(parts.config, parts.limits, device, room, parts.token_bytes)
        coarsest = max(parts.granules)
        kv_tokens = max(kv_tokens // coarsest, 1) * coarsest  # whole granules of every group
        parts.limits = fit(parts.config, parts.limits, kv_tokens)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{parts.figures}") from error
    try:
        runner = ranks.runner(parts.runner(tables, kv_tokens, graphs), kv_tokens, graphs)
        if device.measured:
            run_worst_case(runner, device, parts.limits, parts.granules)
            warm_up(runner, device, parts.limits)
    except OUT_OF_MEMORY as error:
        raise kv_short(error, parts.config, kv_tokens, room, parts.token_bytes, parts.figures) from error
    return runner, kv_tokens


def _stall(parts: Parts, runner: Runner) -> Sequence[tuple[str, str]]:
    """Limit the prompt tokens of a step by the time that they may add (`--prefill_stall_ms`); a line that says so."""
    stall = stall_ms(parts.config, parts.device)
    if not stall:
        return ()
    tokens, line = tokens_within(stall, runner, parts.device, parts.limits)
    parts.limits = replace(parts.limits, stall_tokens=tokens)
    return (("prompts", line),)


def _measured(parts: Parts, tables: Tables, ranks: Ranks) -> int:
    """Run the largest steps; bytes of their graphs."""
    try:
        runner = ranks.runner(parts.runner(tables, 1, GRAPH_BYTES << 4), 1, GRAPH_BYTES << 4)
        graphs = ranks.most("graph_bytes", measure(runner, parts.device, parts.limits, parts.granules))
    except OUT_OF_MEMORY as error:
        raise step_short(error, parts.figures) from error
    del runner  # its graphs go with it
    if parts.device.graphs:
        parts.device.forget_graphs()
    ranks.most("forget_graphs", 0)
    return graphs


def _policies(config: Config) -> tuple[tuple[type[Made], str], ...]:
    """The prefix cache, the scheduling policy and the length estimator that the settings ask for."""
    settings = config.scheduling
    return (
        (KVManagerSpec, "none" if settings.disable_dynamic_prompt_cache else settings.kv_manager),
        (SchedulerSpec, settings.scheduler),
        (LengthEstimatorSpec, settings.estimator),
    )


def _scheduler(parts: Parts, kv_tokens: int, graph_rows: int) -> Scheduler:
    registry, limits = parts.registry, parts.limits
    (_, manager), (_, scheduling), (_, estimating) = _policies(parts.config)
    groups = [
        KVGroup(
            name=name,
            total=kv_tokens // layout.granule,
            rows=limits.max_running,
            max_len=limits.max_total_len,
            manager=made(registry, KVManagerSpec, manager, layout.granule),
            granule=layout.granule,
        )
        for name, layout in parts.layouts.items()
    ]
    for group in groups:
        group.manager = GuardedManager(group, manager)
    policy = made(registry, SchedulerSpec, scheduling, limits)
    guarded = GuardedEstimator(made(registry, LengthEstimatorSpec, estimating, limits), estimating)
    priorities = registry.find(SchedulerSpec, scheduling).priorities
    return Scheduler(
        limits,
        groups,
        policy,
        guarded,
        ahead=parts.device.ahead,
        priorities=priorities,
        graph_rows=graph_rows,
    )


def memory_text(weights: int, kv: int, tokens: int) -> str:
    """Bytes of weights and KV, and the tokens these are, as the summary shows them."""
    return f"weights {weights / 2**20:,.0f} MiB, KV {kv / 2**20:,.0f} MiB for {tokens:,} tokens"


def summary(loaded: Loaded, device: Device, budget: Budget, timings: Mapping[str, float]) -> Sequence[tuple[str, str]]:
    """The start-up summary as (label, text)."""
    kernels: dict[str, dict[str, None]] = {}
    for resolution in loaded.build.resolutions:
        kernels.setdefault(resolution.context.op, {})[resolution.chosen.name] = None
    config = loaded.config
    quant = f", weights through {loaded.quant}, {budget.bits_per_weight:.2f} bits per weight" if loaded.quant else ""
    return (
        ("model", f"{config.architecture}, {budget.parameters / 1e6:,.1f} M parameters, {config.dtype}{quant}"),
        ("device", f"{device.info.type} {device.info.name}".strip()),
        ("kernels", ", ".join(f"{op}={'/'.join(names)}" for op, names in sorted(kernels.items()))),
        *loaded.build.notes.items(),
        ("start", ", ".join(f"{label} {seconds:.1f} s" for label, seconds in timings.items())),
    )
