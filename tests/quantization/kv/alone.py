"""A plugin whose kernels compute every token alone, so that --deterministic has a CPU to run on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from llmcore.api import KernelSpec, OpContext, hookimpl
from llmcore.ops import sample
from llmcore.ops.attention import ReferenceAttention

ATTENTION = ("attn.gqa.decode", "attn.gqa.prefill", "attn.gqa.mixed")
LATENT = ("attn.mla.decode", "attn.mla.prefill", "attn.mla.mixed")
ROWS: Mapping[str, str] = {
    "linear": "llmcore.ops.linear",
    "rms_norm": "llmcore.ops.rms_norm",
    "head_linear": "llmcore_deepseek.ops.head_linear",
}


@hookimpl
def register_kernels() -> Iterable[KernelSpec]:
    for op in (*ATTENTION, *LATENT):
        yield KernelSpec(op=op, name="alone", make=f"{__name__}:attention", batch_invariant=True)
    for op in ROWS:
        yield KernelSpec(op=op, name="alone", make=f"{__name__}:rows", batch_invariant=True)
    yield KernelSpec(op="sample", name="alone", make=f"{__name__}:sampled", batch_invariant=True)
    yield KernelSpec(op="attn.varlen", name="alone", make=f"{__name__}:unused", batch_invariant=True)
    yield KernelSpec(op="attn.merge", name="alone", make=f"{__name__}:unused", batch_invariant=True)


class Alone(ReferenceAttention):
    """The reference, which gets one query at a time: as the last token of a request that ends with it."""

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
        borders, one = meta["q_start"].tolist(), torch.tensor([0, 1])
        for row, length in enumerate(meta["kv_len"].tolist()):
            for token in range(borders[row], borders[row + 1]):
                seen = torch.tensor([length - (borders[row + 1] - 1 - token)])
                here = {**meta, "request": meta["request"][row : row + 1], "q_start": one, "kv_len": seen}
                super().run(q[token : token + 1].clone(), k_new, v_new, kv, here, out[token : token + 1])
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
        return torch.cat([reference(row.clone(), *rest) for row in x.split(1)])

    return run


def sampled(context: OpContext) -> Callable[..., Any]:
    return sample.reference


def unused(context: OpContext) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        raise AssertionError(f"{context.op} is not for deterministic steps")

    return run
