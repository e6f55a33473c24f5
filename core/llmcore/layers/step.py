"""The step that a forward pass gets. The model passes it to every layer as ``layer(x, step)``; nothing is global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Bucketed(Protocol):
    """The part of a step that most layers read: the token bucket, which selects the kernels of their ops."""

    @property
    def bucket(self) -> int:
        """Index into specs.TOKEN_BUCKETS."""


@dataclass(frozen=True)
class Rows:
    """A step with only a token bucket, for the last norm and the head."""

    bucket: int


@dataclass
class KVStep:
    """One KV group in one step.

    `kv`: layer index of the model -> the layout's tensors.
    `slots` [T] int64: the slot for each new token's KV.
    `decode`: the `meta` of AttentionKernel.run for the first `n_decode` rows, with its own `request`, `kv_len` and
      `q_start`.
    `prefill`: the same for the other rows. Its `q_start` also counts from 0.
    `mixed`: the same for all rows, in place of the two, if one kernel computes the whole step.
    """

    kv: Mapping[int, tuple[torch.Tensor, ...]]
    slots: torch.Tensor
    decode: Mapping[str, torch.Tensor]
    prefill: Mapping[str, torch.Tensor]
    mixed: Mapping[str, torch.Tensor] | None = None


@dataclass
class Step:
    """One forward pass over T new tokens of R rows. The first `n_decode` rows have one token each.

    `bucket`: index into specs.TOKEN_BUCKETS, which selects the kernels of ops.
    `tokens` [T] int64: input ids.
    `positions` [P, T] int32: P is 1 (3 for mrope).
    `prompt_len` [T] int32: prompt length of each token's request, for rotary angles that depend on it.
    `sampled` [S] int64: the tokens whose hidden states the head needs; None: all.
    `kv`: KV group -> its KVStep.
    `adapter` [R] int32: adapter slot of each row.
    `notes`: results that a module computes once per forward pass and shares between layers, keyed by the module.
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
