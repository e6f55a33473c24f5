"""Grouped-query attention: the projections, norms and rope around the attention kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from llmcore.api.errors import ConfigError
from llmcore.api.models import AttnSpec
from llmcore.layers.build import Build
from llmcore.layers.layer import Layer
from llmcore.layers.linear import Linear, QKVLinear
from llmcore.layers.norm import RMSNorm
from llmcore.layers.rope import Rope
from llmcore.layers.step import Step


class Attention(Layer):
    """The attention of layer `index` of the model, whose KV is in group `group`.

    `spec` has the heads of the whole model; each rank of `attn_tp` gets its share. The family passes the modules: the
    linears `qkv` and `out`, `rope`, and `norms` over each head of q and k, if it has them, with the same eps. Decode
    rows and prefill rows go to separate kernels, or all to one kernel in a mixed step. Only `qkv` reads the input, so
    the norm before it may be its `source`, and then x may be a Rounded.
    """

    def __init__(
        self,
        build: Build,
        spec: AttnSpec,
        *,
        group: str,
        index: int,
        qkv: QKVLinear,
        out: Linear,
        rope: Rope,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = qkv, out
        self.q_norm: RMSNorm | None
        self.k_norm: RMSNorm | None
        self.q_norm, self.k_norm = norms if norms is not None else (None, None)
        self._normed = norms is not None  # A subclass may set its own norms under the same names.
        if norms is not None and norms[0].eps != norms[1].eps:
            raise ConfigError(f"the norms of q and k have one eps, not {norms[0].eps} and {norms[1].eps}")
        heads, kv_heads = build.mesh.heads(spec.heads, spec.kv_heads)
        spec = replace(spec, heads=heads, kv_heads=kv_heads)
        self.spec, self.group, self.index, self._rope = spec, group, index, rope
        layout = build.layout(group)
        if layout.joined:
            raise ConfigError(f"attention with values of its own needs a layout for them, not {layout.group.layout!r}")
        self._kernels = build.attention(spec, group)
        self._rope_write = build.op(
            "rope_kv_write" if norms is None else "qk_norm_rope_kv_write",
            layout=layout.group.layout,
            granule=layout.granule,
            given={"kv_write": layout.write},
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            size=spec.key_size,
            rotated=rope.rotated,
        )

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], or the Partial that `out` returns. Stores this step's keys and values."""
        qk, v = self.project(x, step)
        cos, sin = self._rope.angles(step)
        state = step.kv[self.group]
        kv = state.kv[self.index]
        qk = self._rope_write[step.bucket](qk, v, *self._head_norms(), cos, sin, kv, state.slots)
        spec, tokens = self.spec, qk.shape[0]
        q, k = qk.split_with_sizes((spec.heads, spec.kv_heads), 1)
        out = qk.new_empty(tokens, spec.heads, spec.value_size)
        n, bucket, kernels = step.n_decode, step.bucket, self._kernels
        if state.mixed is not None:
            kernels.mixed[bucket].run(q, k, v, kv, state.mixed, out)
        elif n == tokens:
            kernels.decode[bucket].run(q, k, v, kv, state.decode, out)
        elif n == 0:
            kernels.prefill[bucket].run(q, k, v, kv, state.prefill, out)
        else:
            kernels.decode[bucket].run(q[:n], k[:n], v[:n], kv, state.decode, out[:n])
            kernels.prefill[bucket].run(q[n:], k[n:], v[n:], kv, state.prefill, out[n:])
        y: torch.Tensor = self.o_proj(out.flatten(1), step)
        return y

    def _head_norms(self) -> tuple[tuple[torch.Tensor, torch.Tensor], float] | tuple[()]:
        """The arguments that qk_norm_rope_kv_write takes and rope_kv_write does not."""
        if not self._normed or self.q_norm is None or self.k_norm is None:
            return ()
        return (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps

    def project(self, x: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys in one tensor [T, heads + kv_heads, key_size], and values [T, kv_heads, value_size].

        A family with another kind of norms for q and k overrides this method and applies them here. It may call them
        `q_norm` and `k_norm`, as checkpoints do. With several ranks, the result has only this rank's heads.
        """
        spec = self.spec
        joined = self.qkv_proj(x, step)
        heads = spec.heads + spec.kv_heads
        qk, v = joined.split_with_sizes((heads * spec.key_size, spec.kv_heads * spec.value_size), 1)
        return qk.view(-1, heads, spec.key_size), v.view(-1, spec.kv_heads, spec.value_size)
