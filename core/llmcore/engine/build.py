"""From settings to an engine: device, model, what fits, scheduler."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from llmcore.budget import GRAPH_BYTES, Machine, predict
from llmcore.config import Config
from llmcore.engine.engine import Engine
from llmcore.engine.explain import fallbacks
from llmcore.engine.guards import GuardedEstimator, GuardedManager
from llmcore.engine.limits import fit, kv_capacity, scheduler_limits
from llmcore.engine.model import Loaded, Progress, load_model, pick_device
from llmcore.engine.profile import measure, run_worst_case, take_workspaces
from llmcore.engine.runner import Runner, StepOps, group_kv
from llmcore.engine.sampling import RowSampler
from llmcore.engine.tables import Tables
from llmcore.errors import ConfigError
from llmcore.kv.group import KVGroup
from llmcore.layers.layout import Layout
from llmcore.ops.sample import VARIANTS
from llmcore.plugins import Made, made
from llmcore.protocols import Device, SchedulerLimits
from llmcore.registry import Registry
from llmcore.sched.scheduler import Scheduler
from llmcore.specs import KVManagerSpec, LengthEstimatorSpec, ModelReport, SchedulerSpec
from llmcore.wire import ModelFacts


logger = logging.getLogger(__name__)


def _silent(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


@dataclass
class _Parts:
    """What is built once and shared: everything of an engine but its KV pools and its scheduler."""

    config: Config
    registry: Registry
    device: Device
    loaded: Loaded
    limits: SchedulerLimits

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each KV group, in the model's order."""
        return {group.name: self.loaded.build.layout(group.name) for group in self.loaded.config.kv_groups}

    @property
    def token_bytes(self) -> int:
        """KV of one token over all groups, rounded up."""
        return sum(-(-layout.bytes // layout.granule) for layout in self.layouts.values())

    def runner(self, tables: Tables, kv_tokens: int, graph_bytes: int) -> Runner:
        """A runner with room for `kv_tokens` tokens in every group, and for graphs."""
        where, build = self.device.torch_device, self.loaded.build
        groups = [
            group_kv(name, layout, -(-kv_tokens // layout.granule), where) for name, layout in self.layouts.items()
        ]
        vocabulary = self.loaded.config.vocab_size
        samplers = {variant: build.op("sample", variant=variant, vocab=vocabulary) for variant in VARIANTS}
        ops = StepOps(
            inputs=build.op("step_inputs"),
            outputs=build.op("step_outputs"),
            slots=tuple(build.op("kv_slots", granule=group.layout.granule) for group in groups),
        )
        sampler = RowSampler(self.device, tables, samplers)
        kernels = self.config.kernels
        return Runner(
            self.loaded.model,
            self.device,
            tables,
            groups,
            sampler,
            ops,
            graph_rows=0 if kernels.disable_cudagraph else kernels.graph_max_batch_size,
            graph_bytes=graph_bytes,
        )


def build_engine(config: Config, registry: Registry, progress: Progress = _silent) -> Engine:
    """Everything that takes time at a start; reports how far it is to `progress`. Raises ConfigError.

    `on_model_built` is called before it returns.
    """
    started = time.monotonic()
    for kind, name in _policies(config):  # before anything takes long
        registry.find(kind, name)
    device = pick_device(registry, config.model.device)
    machine = machine_of(device, config)
    device.reset_peak()
    loaded = _loaded(config, registry, device, progress)
    read = time.monotonic()
    limits = scheduler_limits(config, loaded.config, device)
    parts = _Parts(config, registry, device, loaded, limits)
    tables = Tables(device, limits.max_running, limits.max_total_len, _granules(parts))
    runner, kv_tokens = _runner(parts, tables)
    for line in fallbacks(registry, loaded.build.resolutions):
        logger.warning(line)
    scheduler = _scheduler(parts, kv_tokens)
    fingerprint = _fingerprint(parts)
    report = ModelReport(
        config=loaded.config,
        kernels=loaded.build.chosen(),
        weight_bytes=loaded.weight_bytes,
        kv_tokens=kv_tokens,
        fingerprint=fingerprint,
    )
    registry.call("on_model_built", report=report)
    timings = {"model loaded in": read - started, "ready in": time.monotonic() - started}
    budget = predict(loaded.config, loaded.shapes, config, machine, parts.token_bytes)
    facts = ModelFacts(
        architecture=loaded.config.architecture,
        vocab_size=loaded.config.vocab_size,
        max_input_len=scheduler.limits.max_input_len,
        max_total_len=scheduler.limits.max_total_len,
        kv_tokens=kv_tokens,
        max_running=scheduler.limits.max_running,
        eos_ids=loaded.config.eos_ids,
        generation=loaded.generation,
        fingerprint=fingerprint,
        report=(
            *summary(loaded, device, budget.parameters, timings),
            ("predicted", memory_text(budget.weights, budget.pool, budget.kv_tokens)),
            ("measured", memory_text(loaded.weight_bytes, kv_tokens * parts.token_bytes, kv_tokens)),
        ),
    )
    return Engine(scheduler, runner, device, facts, loaded.config.fixed_angles_up_to)


def _loaded(config: Config, registry: Registry, device: Device, progress: Progress) -> Loaded:
    try:
        return load_model(config, registry, device, progress)
    except torch.OutOfMemoryError as error:
        size = device.info.memory / 2**30
        raise ConfigError(
            f"the weights do not fit into the {size:.1f} GiB of {device.info.name or device.info.type}; take a smaller "
            "model or --data_type; `llmcore plan` predicts what fits where"
        ) from error


def _runner(parts: _Parts, tables: Tables) -> tuple[Runner, int]:
    """The runner and its tokens of KV; the limits are cut to them.

    What the largest steps and their graphs take is measured with next to no KV; KV then gets what is left, and the
    largest step runs once more beside it. Raises ConfigError where that does not fit.
    """
    device, granules = parts.device, _granules(parts)
    take_workspaces(parts.loaded.model.attention_kernels, parts.limits)
    graphs = GRAPH_BYTES
    try:
        if device.measured:
            graphs += measure(parts.runner(tables, 1, GRAPH_BYTES << 4), device, parts.limits, granules)
            device.forget_graphs()
        parts.limits, kv_tokens = _fitted(parts, graphs)
        runner = parts.runner(tables, kv_tokens, graphs)
        if device.measured:
            run_worst_case(runner, device, parts.limits, granules)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the largest step does not fit beside the weights and KV ({error}); lower --batch_max_tokens, "
            "--running_max_req_size, --mem_fraction or --max_total_token_num"
        ) from error
    return runner, kv_tokens


def _granules(parts: _Parts) -> tuple[int, ...]:
    return tuple(layout.granule for layout in parts.layouts.values())


def _fitted(parts: _Parts, graphs: int) -> tuple[SchedulerLimits, int]:
    """The limits cut to the KV there is beside `graphs` bytes, and its tokens: whole granules of every group."""
    kv_tokens = kv_capacity(parts.config, parts.limits, parts.device, parts.token_bytes, graphs)
    coarsest = max(_granules(parts))
    kv_tokens = max(kv_tokens // coarsest, 1) * coarsest
    return fit(parts.config, parts.limits, kv_tokens), kv_tokens


def _policies(config: Config) -> tuple[tuple[type[Made], str], ...]:
    """The prefix cache, the scheduling policy and the length estimator that the settings ask for."""
    settings = config.scheduling
    return (
        (KVManagerSpec, "none" if settings.disable_dynamic_prompt_cache else settings.kv_manager),
        (SchedulerSpec, settings.scheduler),
        (LengthEstimatorSpec, settings.estimator),
    )


def _scheduler(parts: _Parts, kv_tokens: int) -> Scheduler:
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
    return Scheduler(limits, groups, policy, guarded, ahead=parts.device.ahead)


def _fingerprint(parts: _Parts) -> str:
    """A digest of all that decides what a step computes."""
    chosen = sorted(parts.loaded.build.chosen().items())
    text = json.dumps([parts.registry.fingerprint(), chosen, sorted(_granules(parts))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def machine_of(device: Device, config: Config) -> Machine:
    """What a prediction needs to know, before anything takes memory."""
    kv = None if device.measured else device.kv_budget(config.memory.mem_fraction)
    return Machine(info=device.info, memory=device.info.memory, step_tokens=device.step_tokens, kv=kv)


def memory_text(weights: int, kv: int, tokens: int) -> str:
    """Bytes of weights and KV, and the tokens these are, as the summary shows them."""
    return f"weights {weights / 2**20:,.0f} MiB, KV {kv / 2**20:,.0f} MiB for {tokens:,} tokens"


def summary(
    loaded: Loaded, device: Device, parameters: int, timings: Mapping[str, float]
) -> Sequence[tuple[str, str]]:
    """The start-up summary as (label, text)."""
    kernels: dict[str, list[str]] = {}
    for resolution in loaded.build.resolutions:
        names = kernels.setdefault(resolution.context.op, [])
        if resolution.chosen.name not in names:
            names.append(resolution.chosen.name)
    config = loaded.config
    return (
        ("model", f"{config.architecture}, {parameters / 1e6:,.1f} M parameters, {config.dtype}"),
        ("device", f"{device.info.type} {device.info.name}".strip()),
        ("kernels", ", ".join(f"{op}={'/'.join(names)}" for op, names in sorted(kernels.items()))),
        ("start", ", ".join(f"{label} {seconds:.1f} s" for label, seconds in timings.items())),
    )
