"""The choice of an op's kernel: one pure function over the candidates, with a reason for every loser.

The rules, in order: the user's pin; what fits; priority; measured cost; the narrower requirement; the order of
`--plugins`. The order of the candidates plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmcore.api.errors import ResolveError, did_you_mean, reraise_if_stopping, text_of
from llmcore.api.specs import (
    TOKEN_BUCKETS,
    DeviceInfo,
    KernelSpec,
    OpContext,
    OpSpec,
    PluginInfo,
    Requires,
)
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry, fix_for

Candidate = tuple[KernelSpec, PluginInfo]

REFERENCE = "torch"
"""Name of the kernel that every op has: its torch reference."""

_DEPENDS = "its results may depend on the batch, which --deterministic rules out"


@dataclass(frozen=True)
class Resolution:
    """The kernel for one context. `why`: the rule that chose it. `reasons`: kernel name -> why it was not chosen."""

    context: OpContext
    chosen: KernelSpec
    plugin: PluginInfo
    why: str
    reasons: Mapping[str, str] = field(default_factory=dict)


def candidates_for(registry: Registry, op: str) -> list[Candidate]:
    """Every kernel for `op` with its plugin, the torch reference included. Raises ConfigError for an unknown op."""
    spec, owner = registry.owned(OpSpec, op)
    reference = KernelSpec(
        name=REFERENCE,
        op=op,
        make=f"{spec.module}:make",
        priority=0,
        # A composite's expansion consists of other ops, and each of them is resolved by itself.
        batch_invariant=spec.row_wise or bool(spec.expands_to),
        summary="the op's torch reference",
    )
    return [(reference, owner), *(pair for pair in registry.specs(KernelSpec) if pair[0].op == op)]


def resolve(
    candidates: Sequence[Candidate], context: OpContext, pins: Mapping[str, str], order: Sequence[str] = ()
) -> Resolution:
    """Choose the kernel for `context`. `pins`: op -> kernel name; `order`: names given to `--plugins`.

    Raises ResolveError if the pin does not exist or fit, if nothing fits, or if more than one is left.
    """
    candidates = sorted(candidates, key=lambda c: (c[0].name, c[1].name))
    _refuse_duplicates(candidates, context.op)
    reasons = {spec.name: misfit for spec, _ in candidates if (misfit := why_not(spec, context)) is not None}
    if context.op in pins:
        return _pinned(candidates, context, pins[context.op], reasons)
    left = [c for c in candidates if c[0].name not in reasons]
    if not left:
        raise ResolveError(_unfit(candidates, context, reasons))
    why = "the only one that fits"
    for rule in (_by_priority, _by_cost, _by_requirement, _by_order(order)):
        kept = rule(left, context, reasons)
        if len(kept) == 1 and len(left) > 1:
            why = _WHY.get(rule, "first in --plugins")
        left = kept
    if len(left) > 1:
        raise ResolveError(_ambiguous(left, context))
    spec, plugin = left[0]
    return Resolution(context, spec, plugin, why, reasons)


def why_not(spec: KernelSpec, context: OpContext) -> str | None:
    """The reason why a kernel does not fit `context`, or None if it fits."""
    if context.deterministic and not spec.batch_invariant:
        return _DEPENDS
    if (misfit := _unmet(spec.when, context)) is not None or spec.refuses is None:
        return misfit
    try:
        return spec.refuses(context)
    except BaseException as error:  # noqa: BLE001 - a kernel whose own check raises declines, with that reason
        reraise_if_stopping(error)
        return f"refuses() raised {type(error).__name__}: {error}"


def contains(wide: Requires, narrow: Requires) -> bool:
    """True if every context that meets `narrow` also meets `wide`."""
    return (
        wide.device in (None, narrow.device)
        and _range_contains(wide.capability, narrow.capability)
        and _set_contains(wide.dtypes, narrow.dtypes)
        and _set_contains(wide.layouts, narrow.layouts)
        and _set_contains(wide.granules, narrow.granules)
        and _set_contains(wide.buckets, narrow.buckets)
        and all(name in narrow.shape and narrow.shape[name] <= values for name, values in wide.shape.items())
    )


def bucket_text(bucket: int) -> str:
    """The token counts of a bucket: "17-64", "257+"."""
    first, last = TOKEN_BUCKETS[bucket]
    return f"{first}+" if last is None else str(first) if first == last else f"{first}-{last}"


def describe(context: OpContext) -> str:
    """A context as one phrase for messages."""
    shape = ", ".join(f"{name}={value}" for name, value in context.shape.items())
    where = context.device.type
    if context.device.capability is not None:
        where += f" {context.device.capability}"
    return f"{context.op} on {where}, {context.dtype}, {bucket_text(context.bucket)} tokens" + (
        f", {shape}" if shape else ""
    )


# --- what fits -------------------------------------------------------------------------------------------------


def _unmet(when: Requires, context: OpContext) -> str | None:
    if (misfit := device_misfit(when, context.device)) is not None:
        return misfit
    for name, allowed, has in (
        ("dtype", when.dtypes, context.dtype),
        ("layout", when.layouts, context.layout),
        ("granule", when.granules, context.granule),
    ):
        if allowed and has not in allowed:
            return f"needs {name} {_either(allowed)}, has {has}"
    if when.buckets and context.bucket not in when.buckets:
        return f"is for steps of {' or '.join(map(bucket_text, sorted(when.buckets)))} tokens"
    for name, values in when.shape.items():
        size = context.shape.get(name)
        if size not in values:
            return f"needs {name} {_either(values)}, has {size}"
    return None


def device_misfit(when: Requires, device: DeviceInfo) -> str | None:
    """The reason why `device` does not meet a requirement's part about devices, or None if it does."""
    if when.device is not None and when.device != device.type:
        return f"needs device {when.device}, has {device.type}"
    if when.capability is not None:
        low, high = when.capability
        if device.capability is None or not low <= device.capability <= high:
            return f"needs capability {low}-{high}, has {'none' if device.capability is None else device.capability}"
    return None


def _either(values: Iterable[object]) -> str:
    return " or ".join(sorted(str(value) for value in values))


def _range_contains(wide: tuple[int, int] | None, narrow: tuple[int, int] | None) -> bool:
    if wide is None:
        return True
    return narrow is not None and wide[0] <= narrow[0] and narrow[1] <= wide[1]


def _set_contains(wide: frozenset[object], narrow: frozenset[object]) -> bool:
    # an empty set stands for "any"
    return not wide or (bool(narrow) and narrow <= wide)


# --- the rules; each drops losers and writes down why -----------------------------------------------------------

Rule = Callable[[list[Candidate], OpContext, dict[str, str]], list[Candidate]]


def _by_priority(left: list[Candidate], context: OpContext, reasons: dict[str, str]) -> list[Candidate]:
    best = max(spec.priority for spec, _ in left)
    return _keep(left, reasons, lambda spec: None if spec.priority == best else f"priority {spec.priority} < {best}")


def _by_cost(left: list[Candidate], context: OpContext, reasons: dict[str, str]) -> list[Candidate]:
    if len(left) == 1:
        return left
    costs = {spec.name: _cost(spec, plugin, context) for spec, plugin in left}
    best = min((cost for cost in costs.values() if cost is not None), default=None)
    if best is None:
        return left

    def reason(spec: KernelSpec) -> str | None:
        cost = costs[spec.name]
        if cost is None:
            return f"unmeasured here, the chosen one takes {best:g} us"
        return None if cost == best else f"takes {cost:g} us, the chosen one {best:g} us"

    return _keep(left, reasons, reason)


def _by_requirement(left: list[Candidate], context: OpContext, reasons: dict[str, str]) -> list[Candidate]:
    def reason(spec: KernelSpec) -> str | None:
        for other, _ in left:
            if contains(spec.when, other.when) and not contains(other.when, spec.when):
                return f"{other.name} requires more and fits"
        return None

    return _keep(left, reasons, reason)


def _by_order(order: Sequence[str]) -> Rule:
    place = {name: index for index, name in reversed(list(enumerate(order)))}

    def rule(left: list[Candidate], context: OpContext, reasons: dict[str, str]) -> list[Candidate]:
        first = min(place.get(plugin.name, len(order)) for _, plugin in left)
        late = {spec.name for spec, plugin in left if place.get(plugin.name, len(order)) != first}
        return _keep(left, reasons, lambda spec: "its plugin comes later in --plugins" if spec.name in late else None)

    return rule


_WHY: Mapping[Rule, str] = {
    _by_priority: "highest priority",
    _by_cost: "lowest measured cost",
    _by_requirement: "narrowest requirement",
}


def _keep(left: list[Candidate], reasons: dict[str, str], why: Callable[[KernelSpec], str | None]) -> list[Candidate]:
    kept = []
    for spec, plugin in left:
        reason = why(spec)
        if reason is None:
            kept.append((spec, plugin))
        else:
            reasons[spec.name] = reason
    return kept


def _cost(spec: KernelSpec, plugin: PluginInfo, context: OpContext) -> float | None:
    if spec.cost is None:
        return None
    try:
        cost: float | None = load(spec.cost)(replace(context, kernel=spec.name))
    except BaseException as error:
        reraise_if_stopping(error)
        raise ResolveError(
            f"plugin {plugin.name!r} failed in the cost of {spec.name} for {context.op}: {text_of(error)}; "
            f"{fix_for(plugin, error)}"
        ) from error
    if cost is not None and not math.isfinite(cost):
        raise ResolveError(
            f"plugin {plugin.name!r} gives {spec.name} for {context.op} a cost of {cost} us; "
            f"{fix_for(plugin, ResolveError())}"
        )
    return cost


# --- errors ----------------------------------------------------------------------------------------------------


def _refuse_duplicates(candidates: Sequence[Candidate], op: str) -> None:
    owners: dict[str, PluginInfo] = {}
    for spec, plugin in candidates:
        if spec.name in owners:
            raise ResolveError(
                f"two kernels for {op} are called {spec.name!r}, by plugins {owners[spec.name].name!r} and "
                f"{plugin.name!r}; leave one out with --plugins=-{plugin.name}"
            )
        owners[spec.name] = plugin


def _pinned(candidates: Sequence[Candidate], context: OpContext, name: str, reasons: Mapping[str, str]) -> Resolution:
    for spec, plugin in candidates:
        if spec.name == name and name not in reasons:
            others = {s.name: reasons.get(s.name, f"{name} is pinned") for s, _ in candidates if s.name != name}
            return Resolution(context, spec, plugin, "pinned", others)
    if name in reasons:
        raise ResolveError(
            f"--kernel {context.op}={name} does not fit {describe(context)}: {reasons[name]}; "
            f"there are:{_listed(candidates, reasons)}"
        )
    names = [spec.name for spec, _ in candidates]
    raise ResolveError(
        f"--kernel {context.op}={name}: there is no such kernel.{did_you_mean(name, names)} "
        f"There are:{_listed(candidates, reasons)}"
    )


def _listed(candidates: Sequence[Candidate], reasons: Mapping[str, str]) -> str:
    return (
        "".join(f"\n  {spec.name} ({plugin.name}): {reasons.get(spec.name, 'fits')}" for spec, plugin in candidates)
        or " none"
    )


def _unfit(candidates: Sequence[Candidate], context: OpContext, reasons: Mapping[str, str]) -> str:
    text = f"no kernel for {describe(context)} fits:{_listed(candidates, reasons)}"
    if not context.deterministic:
        return text
    return (
        f"--deterministic: {text}\nA kernel of {context.op} is needed whose results do not depend on the batch: "
        "install a plugin that brings one for this device, or leave --deterministic out."
    )


def _ambiguous(left: Sequence[Candidate], context: OpContext) -> str:
    choices = "".join(f"\n  --kernel {context.op}={spec.name}   ({plugin.name})" for spec, plugin in left)
    return f"more than one kernel is as good for {describe(context)}; choose one:{choices}"
