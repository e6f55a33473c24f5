"""`llmcore plan MODEL`: the memory budget, before anything is loaded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from llmcore.api.errors import ConfigError
from llmcore.api.models import ModelConfig
from llmcore.api.protocols import Device
from llmcore.api.specs import DeviceSpec
from llmcore.cli.display import Stages
from llmcore.cli.options import Resolved, SettingsCommand, with_model
from llmcore.config import Config
from llmcore.engine.memory import Budget, Machine, predict, token_bytes
from llmcore.registry.devices import find_device
from llmcore.registry.loader import load
from llmcore.registry.model_sources import model_outlined
from llmcore.registry.modes import chosen_modes
from llmcore.registry.registry import Registry
from llmcore.weights.source import open_checkpoint

if TYPE_CHECKING:
    from llmcore.engine.blueprint import Built
    from llmcore.weights.load import Weighed

ACCELERATOR_STEP_TOKENS = 8192
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Plan:
    """The command's output: the model, the machine, the stored types and the prediction.

    `quant`: the method that reads or makes quantized weights. `layouts`: of the model's KV groups.
    `doubled`: checkpoint tensors that are counted here, but take no memory if they equal the embedding. Headers do not
    tell whether they do.
    """

    model: ModelConfig
    machine: Machine
    stored: Mapping[str, int]
    quant: str | None
    budget: Budget
    ranks: int
    layouts: tuple[str, ...]
    doubled: tuple[str, ...] = ()


@click.command(cls=SettingsCommand, groups=("model", "memory", "scheduling", "kernels", "plugins", "plugin_options"))
@click.argument("model", required=False)
@click.option("--memory", metavar="SIZE", help="Plan for a device with this much memory: 80GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(resolved: Resolved, model: str | None, memory: str | None, as_json: bool) -> None:
    """Predict what fits, from a model's headers alone.

    MODEL is a directory, a GGUF file or a name, as in --model_dir. By a name, only headers are fetched. --device sm90
    --memory 80GiB plans for another machine.
    It takes the options of `serve`, so that you can plan a server's command line; some options do not change the plan.
    """
    size, registry = parse_size(memory) if memory else None, resolved.registry
    wanted = with_model(resolved.config, model)
    with closing(Stages()) as stages, model_outlined(wanted, registry, stages.update) as config:
        plan = make_plan(config, registry, size)
    if as_json:
        click.echo(json.dumps(_as_json(plan), indent=2))
    else:
        _show(plan)


def make_plan(config: Config, registry: Registry, memory: int | None) -> Plan:
    """Read config and headers, build the model without its data, predict. `memory`: bytes of the device, or None."""
    from llmcore.engine.blueprint import blueprint
    from llmcore.layers.mesh import tensor_parallel

    dummy = config.model.load_format == "dummy"
    checkpoint = open_checkpoint(registry, config.model.path, weights=not dummy)
    machine = find_machine(registry, config.model.device, memory)
    mesh = tensor_parallel(0, config.model.ranks) if config.model.ranks > 1 else None
    plain = blueprint(config, registry, machine.info, checkpoint, mesh)
    built = plain.pinned(chosen_modes(config, registry), config.kernels.kernel).dry()
    weights, doubled = _weights(built, dummy)
    stored = Counter(dtype for name, (_, dtype) in checkpoint.sizes().items() if built.names.targets(name))
    layouts = [built.build.layout(group.name) for group in plain.model.kv_groups]
    budget = predict(plain.model, weights, config, machine, token_bytes(layouts), built.build.buffers)
    return Plan(
        model=plain.model,
        machine=machine,
        stored={"drawn": weights.tensors} if dummy else stored,
        quant=built.quant,
        budget=budget,
        ranks=config.model.ranks,
        layouts=tuple(dict.fromkeys(layout.group.layout for layout in layouts)),
        doubled=doubled,
    )


def _weights(built: Built, dummy: bool) -> tuple[Weighed, tuple[str, ...]]:
    """The parameters of a model, and the checkpoint's tensors for a parameter that another tensor fills too."""
    from llmcore.weights.fit import first_names, tie
    from llmcore.weights.load import weigh

    if dummy:
        return weigh(built.model), ()
    targets = {name: {t.name for t in built.names.targets(name)} for name in built.checkpoint.sizes()}
    filled = set[str]().union(*targets.values())
    tie(built.model, built.names, filled)
    shared = {name for name, first in first_names(built.model).items() if name != first and {name, first} <= filled}
    doubled = tuple(name for name, found in targets.items() if found & shared)
    weights, own = weigh(built.model), [built.model.get_parameter(name) for name in shared]
    weights = replace(
        weights,
        parameters=weights.parameters + sum(parameter.numel() for parameter in own),
        bytes=weights.bytes + sum(parameter.nbytes for parameter in own),
    )
    return weights, doubled


def find_machine(registry: Registry, name: str, memory: int | None) -> Machine:
    """The device to plan for: one of this machine, or a named accelerator with `memory` bytes."""
    info = find_device(registry, name)
    spec = registry.find(DeviceSpec, info.type)
    reason = load(spec.available)()
    device: Device | None = load(spec.make)(0) if reason is None else None
    if device is not None and info.capability not in (None, device.info.capability):
        reason, device = f"{device.info.name} is, of another compute capability", None
    if device is None:
        if memory is None:
            raise ConfigError(f"--device {name} is not here ({reason}); say how much memory it has: --memory 80GiB.")
        return Machine(info=info, memory=memory, step_tokens=ACCELERATOR_STEP_TOKENS, kv=None)
    kv = None if device.measured else device.kv_budget(1.0)
    if kv is not None and memory is not None:
        where = device.info.type
        raise ConfigError(f"--memory: on {where} KV takes what is free now, or --max_total_token_num; leave it out.")
    return Machine(info=device.info, memory=memory or device.info.memory, step_tokens=device.step_tokens, kv=kv)


def parse_size(text: str) -> int:
    """Bytes from 80GiB, 80GB, 80G or a plain number; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip())
    if match is None:
        raise ConfigError(f"--memory: {text!r} is no size; write 80GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def show_bytes(size: float) -> str:
    """A size with its unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "architecture": plan.model.architecture,
        "max_position": plan.model.max_position,
        "device": asdict(plan.machine.info),
        "ranks": plan.ranks,
        "stored": dict(plan.stored),
        "quant": plan.quant,
        "doubled": plan.doubled,
        "layouts": plan.layouts,
        "budget": {**asdict(plan.budget), "bits_per_weight": plan.budget.bits_per_weight, "fits": plan.budget.fits},
    }


def _show(plan: Plan) -> None:
    budget = plan.budget
    stored = ", ".join(f"{count} {dtype}" for dtype, count in sorted(plan.stored.items()))
    typical = min(2048, budget.longest)
    bits = f", {budget.bits_per_weight:.2f} bits per weight through {plan.quant}" if plan.quant else ""
    doubled = f", with {plan.doubled[0]} (less if it is equal to the embedding)" if plan.doubled else ""
    rows = [
        *([("ranks", f"{plan.ranks}; the rest is of one of them")] if plan.ranks > 1 else []),
        ("model", f"{plan.model.architecture}, {budget.parameters / 1e6:,.1f} M parameters, runs as {budget.dtype}"),
        ("stored", f"{stored} tensors"),
        ("device", f"{plan.machine.info.name or plan.machine.info.type}, {show_bytes(budget.memory)}"),
        ("weights", show_bytes(budget.weights) + bits + doubled),
        ("a step", f"{show_bytes(budget.activations)} for intermediate results (estimated)"),
        ("tables", show_bytes(budget.tables)),
        ("graphs", show_bytes(budget.graphs)),
        *([("between ranks", f"{show_bytes(budget.buffers)} of buffers")] if budget.buffers else []),
        ("KV per token", f"{show_bytes(budget.kv_token)} in layout {', '.join(plan.layouts)}"),
        ("KV memory", f"{show_bytes(budget.pool)}: {budget.limit}"),
        ("KV tokens", f"{budget.kv_tokens:,}"),
        ("longest request", f"{budget.longest:,} tokens (the model's maximum: {plan.model.max_position:,})"),
        ("at once", f"{budget.kv_tokens // typical:,} requests of {typical:,} tokens" if typical else "nothing"),
    ]
    for name, value in rows:
        click.echo(f"{name:<16} {value}")
    if not budget.fits:
        click.echo("This does not fit: use a smaller --data_type, less --batch_max_tokens, or a larger device.")
