"""A plugin whose kernels compute every token alone, so that --deterministic has a CPU to run on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from llmcore.api import KernelSpec, OpContext, hookimpl
from llmcore.layers import Dispatched
from llmcore.ops import moe_combine, moe_dispatch, moe_experts, moe_route, sample
from llmcore.ops.attention import ReferenceAttention, attend, token_slots

ATTENTION = ("attn.gqa.decode", "attn.gqa.prefill", "attn.gqa.mixed")
LATENT = ("attn.mla.decode", "attn.mla.prefill", "attn.mla.mixed")
ROWS: Mapping[str, str] = {
    "linear": "llmcore.ops.linear",
    "rms_norm": "llmcore.ops.rms_norm",
    "head_linear": "llmcore_deepseek.ops.head_linear",
}

MIXTURE: Mapping[str, str] = {
    "moe.route": "routed",
    "moe.dispatch": "dispatched",
    "moe.experts": "experts",
    "moe.combine": "combined",
}


@hookimpl
def register_kernels() -> Iterable[KernelSpec]:
    for op in (*ATTENTION, *LATENT):
        yield KernelSpec(op=op, name="alone", make=f"{__name__}:attention", batch_invariant=True)
    for op in ROWS:
        yield KernelSpec(op=op, name="alone", make=f"{__name__}:rows", batch_invariant=True)
    for op in MIXTURE:
        yield KernelSpec(op=op, name="alone", make=f"{__name__}:{MIXTURE[op]}", batch_invariant=True)
    yield KernelSpec(op="sample", name="alone", make=f"{__name__}:sampled", batch_invariant=True)
    yield KernelSpec(op="attn.varlen", name="alone", make=f"{__name__}:unused", batch_invariant=True)
    yield KernelSpec(op="attn.merge", name="alone", make=f"{__name__}:unused", batch_invariant=True)


class Alone(ReferenceAttention):
    """Every query attends alone. This step's keys and values come from its arguments, earlier ones from the pool."""

    def run(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor | None,
        kv: tuple[torch.Tensor, ...],
        meta: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        borders, spec = meta["q_start"].tolist(), self.spec
        new = k_new.view(len(k_new), spec.kv_heads, -1)
        news = new, new[..., : spec.value_size] if v_new is None else v_new
        for row, (request, length) in enumerate(zip(meta["request"].tolist(), meta["kv_len"].tolist(), strict=True)):
            first, last = borders[row], borders[row + 1]
            before = length - (last - first)
            slots = token_slots(meta["table"][request], 0, before, self.granule)
            found = zip(self._gather(kv, slots), news, strict=True)
            keys, values = (torch.cat((old, part[first:last])) for old, part in found)
            for token in range(first, last):
                seen = before + token - first + 1
                out[token] = attend(q[token : token + 1].clone(), keys[:seen], values[:seen], spec)[0][0]
        return out


def attention(context: OpContext) -> ReferenceAttention:
    return Alone(context)


def rows(context: OpContext) -> Callable[..., torch.Tensor]:
    reference = import_module(ROWS[context.op]).reference

    def run(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if context.op == "head_linear":  # (x, weight, beside): both have rows
            weight, *beside = rest
            return torch.cat(
                [
                    reference(x[i : i + 1].clone(), weight, *(b[i : i + 1].clone() for b in beside))
                    for i in range(len(x))
                ]
            )
        return torch.cat([reference(x[i : i + 1].clone(), *rest) for i in range(len(x))])

    return run


def routed(context: OpContext) -> Callable[..., Any]:
    reference = moe_route.make(context)

    def run(x: torch.Tensor, *rest: Any) -> Any:
        weights, chosen = zip(*(reference(x[i : i + 1].clone(), *rest) for i in range(len(x))), strict=True)
        return torch.cat(weights), torch.cat(chosen)

    return run


def dispatched(context: OpContext) -> Callable[..., Any]:
    return moe_dispatch.make(context)


def experts(context: OpContext) -> Callable[..., torch.Tensor]:
    reference = moe_experts.make(context)

    def run(tokens: Dispatched, gate_up: torch.Tensor, down: torch.Tensor, into: Any = None) -> torch.Tensor:
        y = torch.empty(len(tokens.pairs), tokens.x.shape[1]) if into is None else into
        for pair in range(len(tokens.pairs)):
            reference(replace(tokens, starts=tokens.starts.clamp(pair, pair + 1)), gate_up, down, y)
        return y

    return run


def combined(context: OpContext) -> Callable[..., torch.Tensor]:
    return moe_combine.reference


def sampled(context: OpContext) -> Callable[..., Any]:
    return sample.reference


def unused(context: OpContext) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        raise AssertionError(f"{context.op} is not for deterministic steps")

    return run
