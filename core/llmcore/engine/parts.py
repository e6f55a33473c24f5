"""The parts of an engine that every rank of a group has: its device, its model, and runners for what fits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in torch's stubs

from llmcore.api.processors import LogitsProcessorSpec
from llmcore.api.protocols import Device, SchedulerLimits
from llmcore.config import Config
from llmcore.config.tree import START_SECONDS
from llmcore.engine.blueprint import blueprint
from llmcore.engine.engine import OUT_OF_MEMORY
from llmcore.engine.memory import (
    Budget,
    Machine,
    figures,
    predict,
    scheduler_limits,
    tables_short,
    token_bytes,
    weights_short,
)
from llmcore.engine.model import Loaded, Progress, load_model, pick_device
from llmcore.engine.model_runner import GroupKV, ModelRunner, StepOps
from llmcore.engine.own_draw import own_samplers
from llmcore.engine.rank_messages import RankReady
from llmcore.engine.sampler import RowSampler, RowScorer
from llmcore.engine.upload import Tables
from llmcore.layers.layout import Layout
from llmcore.layers.mesh import Mesh, tensor_parallel
from llmcore.ops.comm import connect
from llmcore.ops.sample import VARIANTS, Sampler
from llmcore.registry.modes import chosen_modes
from llmcore.registry.registry import Registry
from llmcore.weights.load import weigh
from llmcore.weights.source import open_checkpoint


def silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""


@dataclass
class Parts:
    """Everything of an engine but its KV pools and its scheduler: it is built once and shared."""

    config: Config
    registry: Registry
    device: Device
    loaded: Loaded
    limits: SchedulerLimits
    machine: Machine
    free: int
    """Bytes free before anything was loaded."""
    left: int
    """Bytes free when the weights had been loaded."""
    samplers: Mapping[str, Sequence[Sampler]]
    """By variant of a draw."""
    own: Mapping[str, Sequence[Sampler]]
    """The same, for variants that are drawn from the logits that each rank has of its own."""
    ops: StepOps

    @property
    def budget(self) -> Budget:
        """The prediction."""
        return predict(
            self.loaded.config,
            self.loaded.weights,
            self.config,
            self.machine,
            self.token_bytes,
            self.loaded.build.buffers,
        )

    @property
    def figures(self) -> str:
        """The prediction beside what is measured, for where memory is short."""
        return figures(self.budget, self.device, self.free)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each KV group, in the model's order."""
        return {group.name: self.loaded.build.layout(group.name) for group in self.loaded.config.kv_groups}

    @property
    def granules(self) -> tuple[int, ...]:
        """Tokens of a granule of each KV group."""
        return tuple(layout.granule for layout in self.layouts.values())

    @property
    def token_bytes(self) -> int:
        """KV of one token over all groups."""
        return token_bytes(self.layouts.values())

    @property
    def identities(self) -> list[str]:
        """What each KV group stores: see Layout.identity."""
        return [layout.identity for layout in self.layouts.values()]

    def runner(self, tables: Tables, kv_tokens: int, graph_bytes: int) -> ModelRunner:
        """A runner with room for `kv_tokens` tokens in every group, and for graphs."""
        where = self.device.torch_device
        groups = [
            GroupKV(name, layout, -(-kv_tokens // layout.granule), where) for name, layout in self.layouts.items()
        ]
        vocabulary, scores = self.loaded.config.vocab_size, self.loaded.config.scores
        sampler = (RowScorer if scores else RowSampler)(tables, self.samplers, vocabulary, self.own)
        kernels = self.config.kernels
        return ModelRunner(
            self.loaded.model,
            self.device,
            tables,
            groups,
            sampler,
            self.ops,
            graph_rows=0 if kernels.disable_cudagraph else kernels.graph_max_batch_size,
            graph_bytes=graph_bytes,
            steered=any(
                spec.kind != "device" and spec.enabled(self.config.plugin_options)
                for spec, _ in self.registry.specs(LogitsProcessorSpec)
            ),
        )


def join(store: str, rank: int, ranks: int) -> Mesh:
    """The mesh of `rank` of `ranks` processes that share every layer, once all of them have joined.

    `store`: a file of this host that none of them has used before. Ranks wait for each other for START_SECONDS at most
    until the engine is ready, then for `--rank_timeout`. Raises RuntimeError if a rank does not come.
    """
    if ranks == 1:
        return Mesh()
    return tensor_parallel(rank, ranks, connect(FileStore(store, ranks), rank, ranks, START_SECONDS))


def load_parts(
    config: Config, registry: Registry, progress: Progress, index: int = 0, mesh: Mesh | None = None
) -> Parts:
    """Load the model, or this rank's part of it, on device number `index`. Raises ConfigError."""
    device, mesh = pick_device(registry, config.model.device, index), mesh or Mesh()
    # ranks and engines share the host's cores
    torch.set_num_threads(max(1, torch.get_num_threads() // (mesh.size("attn_tp") * config.model.dp)))
    kv = None if device.measured else device.kv_budget(config.memory.mem_fraction)
    machine = Machine(info=device.info, memory=device.info.memory, step_tokens=device.step_tokens, kv=kv)
    device.reset_peak()
    free = device.free_memory()
    try:
        loaded = load_model(config, registry, device, progress, mesh)
    except OUT_OF_MEMORY as error:
        raise weights_short(device, figures(_predicted(config, registry, machine, mesh), device, free)) from error
    limits = scheduler_limits(config, loaded.config, device)
    left, build = device.free_memory(), loaded.build
    drawn = () if loaded.config.scores else VARIANTS
    samplers = {variant: build.op("sample", variant=variant, vocab=loaded.config.vocab_size) for variant in drawn}
    own = {} if loaded.config.scores else own_samplers(build)
    ops = StepOps(
        inputs=build.op("step_inputs"),
        outputs=build.op("step_outputs"),
        slots=tuple(
            build.op("kv_slots", granule=build.layout(group.name).granule) for group in loaded.config.kv_groups
        ),
    )
    return Parts(config, registry, device, loaded, limits, machine, free, left, samplers, own, ops)


def tables_of(parts: Parts) -> Tables:
    """The tables of running requests. Raises ConfigError if they do not fit."""
    limits = parts.limits
    try:
        return Tables(parts.device, limits.max_running, limits.max_total_len, parts.granules)
    except OUT_OF_MEMORY as error:
        raise tables_short(error, parts.config, limits.max_total_len) from error


def fingerprint_of(parts: Parts) -> str:
    """A digest of all that decides what a step computes."""
    chosen = sorted(parts.loaded.build.chosen().items())
    notes = sorted(parts.loaded.build.notes.items())
    built = [chosen, sorted(parts.granules), parts.identities, parts.loaded.quant, notes, parts.config.revision]
    text = json.dumps([parts.registry.fingerprint(), *built])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ready_of(parts: Parts, rank: int) -> RankReady:
    """What rank `rank` tells the others of its model."""
    return RankReady(rank, parts.loaded.build.chosen(), parts.registry.fingerprint(), fingerprint_of(parts))


def _predicted(config: Config, registry: Registry, machine: Machine, mesh: Mesh) -> Budget:
    """The prediction for a model whose weights could not be loaded."""
    checkpoint = open_checkpoint(registry, config.model.path, weights=False)
    modes = chosen_modes(config, registry)
    plan = blueprint(config, registry, machine.info, checkpoint, mesh).pinned(modes, config.kernels.kernel)
    dry = plan.dry()
    layouts = [dry.build.layout(group.name) for group in plan.model.kv_groups]
    return predict(plan.model, weigh(dry.model), config, machine, token_bytes(layouts), dry.build.buffers)
