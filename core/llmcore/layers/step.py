"""What a forward sees of its step. Every layer is called as ``layer(x, step)``; nothing here is global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Bucketed(Protocol):
    """The part of a step that most layers read: the token bucket their ops are bound for."""

    @property
    def bucket(self) -> int:
        """Index into specs.TOKEN_BUCKETS."""


@dataclass(frozen=True)
class Rows:
    """A step of nothing but rows, for the layers after the last: norm and head."""

    bucket: int


@dataclass
class KVStep:
    """One KV group in one step.

    `kv`: the layout's tensors per layer index of the model. `slots` [T] int64: where each new token's KV goes.
    `decode`, `prefill`: what AttentionKernel.run gets as `meta` for the first `n_decode` rows and for the others; each
    has its own `request`, `kv_len` and `q_start`, and `q_start` counts from 0 in both. `mixed`: the same for all rows
    together, in place of the two, where the step goes through one kernel.
    """

    kv: Mapping[int, tuple[torch.Tensor, ...]]
    slots: torch.Tensor
    decode: Mapping[str, torch.Tensor]
    prefill: Mapping[str, torch.Tensor]
    mixed: Mapping[str, torch.Tensor] | None = None


@dataclass
class Step:
    """One forward over T new tokens of R rows, the first `n_decode` rows one token each.

    `tokens` [T] int64 input ids. `positions` [P, T] int32, P = 1 (3 for mrope). `bucket`: index into
    specs.TOKEN_BUCKETS, for ops bound per bucket. `prompt_len` [T] int32: the prompt's length of each token's
    request (for rotary angles that depend on it). `sampled` [S] int64: the tokens whose hidden states the head
    needs, None where it needs all of them. `adapter` [R] int32: adapter slot per row. `notes` is for modules that
    compute something once per forward and share it between layers, keyed by themselves.
    """

    bucket: int
    n_decode: int
    tokens: torch.Tensor
    positions: torch.Tensor
    prompt_len: torch.Tensor
    sampled: torch.Tensor | None
    kv: Mapping[str, KVStep]
    adapter: torch.Tensor | None = None
    notes: dict[object, torch.Tensor] = field(default_factory=dict)
