"""Multi-head latent attention (arXiv:2405.04434, section 2.1): one latent row per token gives all keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from llmcore.api import AttentionKernel, AttnSpec, ConfigError, Shard, bucket_of
from llmcore.layers import (
    AttentionKernels,
    Bucketed,
    Build,
    Layer,
    Linear,
    RMSNorm,
    Rope,
    Rows,
    Step,
    Unquantized,
    apart,
    shape_of,
)

from llmcore_deepseek.latent import LatentPrefill, LatentSizes, Piece, Room

MLA_FUSE: Mapping[str, tuple[str, ...]] = {"q_kv_a_proj": ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")}
"""The modules that MLA stacks, for a family's `WeightMap.fuse`."""

_HEADS = "attn_tp"


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """The latent attention of a family, in sizes of the whole model; widths are in elements.

    `heads`: number of query heads.
    `plain`, `rotated`: widths of the two parts of a head's key, without and with rope.
    `value`: width of a head's value. `latent`: width of a token's latent.
    `scale`: factor of the scores. `eps`: of the norms of the latents.
    `q_rank`: width of the latent of the queries; None if queries come from the hidden state.
    `bias`: the linears into the latents and the last linear have a bias.
    `interleaved`: the checkpoint has the two numbers of a rotary pair side by side.
    """

    heads: int
    plain: int
    rotated: int
    value: int
    latent: int
    scale: float
    q_rank: int | None = None
    bias: bool = False
    eps: float = 1e-6
    interleaved: bool = False


class MLA(Layer):
    """The latent attention of layer `index` of the model, whose KV is in group `group`.

    The group's layout stores one row per token: the latent and the rotated part of the key. Every rank of `attn_tp`
    has the same rows and its share of the heads. A few new tokens use the absorbed form, many the expanded form (see
    llmcore_deepseek.latent).
    """

    def __init__(self, build: Build, hidden: int, spec: LatentSpec, *, group: str, index: int, rope: Rope) -> None:
        super().__init__()
        self.spec, self.group, self.index, self._rope = spec, group, index, rope
        per_head = Shard(_HEADS, 0, spec.plain + spec.rotated)
        heads = build.mesh.share(spec.heads, Shard(_HEADS, 0), "attention heads")
        self.sizes = LatentSizes(
            heads=heads, plain=spec.plain, rotated=spec.rotated, value=spec.value, latent=spec.latent
        )
        queries, row = spec.heads * per_head.multiple, spec.latent + spec.rotated
        # One linear for all projections of the hidden state: one launch, which reads the hidden state once.
        first = {"q_proj": queries} if spec.q_rank is None else {"q_a_proj": spec.q_rank}
        self.q_kv_a_proj = Linear(
            build,
            hidden,
            {**first, "kv_a_proj_with_mqa": row},
            bias=spec.bias,
            shard=per_head if spec.q_rank is None else None,
            replicated=frozenset({"kv_a_proj_with_mqa"}),
        )
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if spec.q_rank is not None:
            self.q_a_layernorm = RMSNorm(build, spec.q_rank, spec.eps)
            self.q_b_proj = Linear(build, spec.q_rank, queries, shard=per_head, source=self.q_a_layernorm)
        elif spec.bias:
            raise ConfigError("latent attention whose queries come from the hidden state has no biases")
        self.kv_a_layernorm = RMSNorm(build, spec.latent, spec.eps)
        # The absorbed form reads this weight as one matrix per head, so it stays plain, in the model's dtype.
        up = spec.plain + spec.value
        self.kv_b_proj = Linear(
            build,
            spec.latent,
            spec.heads * up,
            shard=Shard(_HEADS, 0, up),
            weight=build.empty(heads * up, spec.latent),
            method=Unquantized(),
        )
        self.o_proj = Linear(
            build, spec.heads * spec.value, hidden, bias=spec.bias, shard=Shard(_HEADS, 1), partial=True
        )
        self._up: tuple[torch.Tensor, torch.Tensor] | None = None
        self._bind(build)

    def _bind(self, build: Build) -> None:
        n, scale = self.sizes, self.spec.scale
        layout = build.layout(self.group)
        if not layout.joined:
            raise ConfigError(f"latent attention needs a layout of one row per token, not {layout.group.layout!r}")
        absorbed = AttnSpec(heads=n.heads, kv_heads=1, key_size=n.latent + n.rotated, value_size=n.latent, scale=scale)
        wrap = partial(_wrap, sizes=n, granule=layout.granule, expands=not build.deterministic)
        self._layout = layout
        self._kernels = build.attention(absorbed, self.group, "attn.mla", wrap)
        if any(isinstance(kernel, LatentPrefill) and kernel.room.sizes != n for kernel in self._kernels.prefill):
            raise ConfigError(f"KV group {self.group!r} has latent attention of two sizes; declare two groups")
        key = n.plain + n.rotated
        expanded = {"heads": n.heads, "kv_heads": n.heads, "key_size": key, "value_size": n.value, "scale": scale}
        self._causal, self._full = (
            build.op("attn.varlen", **shape_of(AttnSpec(**expanded, mask=mask)))  # type: ignore[arg-type]
            for mask in ("causal", "full")
        )
        self._merge = build.op("attn.merge", heads=n.heads, value_size=n.value)
        self._up_q = build.op("head_linear", heads=n.heads, inputs=n.plain, outputs=n.latent)
        self._up_v = build.op("head_linear", heads=n.heads, inputs=n.latent, outputs=n.value)
        self._rope_write = build.op(
            "latent_rope_kv_write",
            layout=layout.group.layout,
            granule=layout.granule,
            given={"kv_write": layout.write},
            heads=n.heads,
            size=key,
            latent=n.latent,
            rotated=n.rotated,
        )

    def finish(self) -> None:
        """Reorder interleaved rotary pairs for op `rope`, which pairs elements half a head apart.

        Scores do not change. The loader calls it before the linears are bound.
        """
        n, q_rank = self.sizes, self.spec.q_rank
        if self.spec.interleaved:
            key = n.plain + n.rotated
            queries = _halves(n.plain, n.rotated).repeat(n.heads) + torch.arange(n.heads).repeat_interleave(key) * key
            row = _halves(n.latent, n.rotated)
            if self.q_b_proj is not None:
                self.q_b_proj.reorder(queries)
            first = queries if q_rank is None else torch.arange(q_rank)
            self.q_kv_a_proj.reorder(torch.cat((first, len(first) + row)))
        weight = self.kv_b_proj.get_parameter("weight").data.view(n.heads, n.plain + n.value, n.latent)
        self._up = weight[:, : n.plain].transpose(1, 2), weight[:, n.plain :]

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]. Stores this step's latent rows in the KV pool."""
        q, row = self.project(x, step)
        cos, sin = self._rope.angles(step)
        state, norm = step.kv[self.group], self.kv_a_layernorm
        kv = state.kv[self.index]
        q, row = self._rope_write[step.bucket](q, row, norm.weight, norm.eps, cos, sin, kv, state.slots)
        y: torch.Tensor = self.o_proj(self._attend(q, row, step).flatten(1), step)
        return y

    def project(self, x: torch.Tensor, step: Bucketed) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, heads, plain + rotated] and rows [T, latent + rotated], before norm and rope."""
        n = self.sizes
        joined = self.q_kv_a_proj(x, step)
        row_size = n.latent + n.rotated
        q, row = joined.split_with_sizes((joined.shape[1] - row_size, row_size), 1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q, step), step)
        return q.view(-1, n.heads, n.plain + n.rotated), row

    def _attend(self, q: torch.Tensor, row: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, heads, value]: decode rows and prefill rows with separate kernels, or all rows with the mixed kernel."""
        state, n, kernels = step.kv[self.group], step.n_decode, self._kernels
        if state.mixed is not None:
            return self._absorbed(kernels.mixed[step.bucket], q, row, state.mixed, step)
        if n == q.shape[0]:
            return self._absorbed(kernels.decode[step.bucket], q, row, state.decode, step)
        if n == 0:
            return self._prefilled(q, row, step)
        first = self._absorbed(kernels.decode[step.bucket], q[:n], row[:n], state.decode, step)
        return torch.cat((first, self._prefilled(q[n:], row[n:], step)))

    def _prefilled(self, q: torch.Tensor, row: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, heads, value] of the prefill rows, in the absorbed or the expanded form, as `plan` chose."""
        kernel, meta = self._kernels.prefill[step.bucket], step.kv[self.group].prefill
        if "segments" not in meta:
            return self._absorbed(kernel, q, row, meta, step)
        assert isinstance(kernel, LatentPrefill), "only this kernel cuts a prefix"
        return self._expanded(kernel, q, row, meta, step)

    def _absorbed(
        self, kernel: AttentionKernel, q: torch.Tensor, row: torch.Tensor, meta: Mapping[str, torch.Tensor], step: Step
    ) -> torch.Tensor:
        """[T, heads, value] in the absorbed form: up-projections apply to queries and results, not to latent rows."""
        assert self._up is not None, "weights are bound by the loader"
        (up_q, up_v), n = self._up, self.sizes
        absorbed = self._up_q[step.bucket](q[..., : n.plain], up_q, q[..., n.plain :])
        out = q.new_empty(len(q), n.heads, n.latent)
        kernel.run(absorbed, row.unsqueeze(1), None, step.kv[self.group].kv[self.index], meta, out)
        y: torch.Tensor = self._up_v[step.bucket](out, up_v)
        return y

    def _expanded(
        self, kernel: LatentPrefill, q: torch.Tensor, row: torch.Tensor, meta: Mapping[str, torch.Tensor], step: Step
    ) -> torch.Tensor:
        """[T, heads, value] in the expanded form: new tokens among themselves, merged with each piece of the prefix.

        `latent.Room` counts the tensors that are alive here at once.
        """
        bucket, borders, longest = step.bucket, meta["q_start"], (kernel.longest, kernel.longest)
        out: torch.Tensor
        out, lse = self._causal[bucket](q, *self._keys_and_values(row), borders, borders, longest)
        for piece in kernel.pieces(step, meta):
            seen = piece.queries
            part, part_lse = self._cached(piece, q[seen], step)
            parts, lses = torch.stack((out[seen], part)), torch.stack((lse[seen], part_lse))
            del part
            out[seen], lse[seen] = self._merge[bucket](parts, lses)
            del parts
        return out

    def _cached(self, piece: Piece, q: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the queries over a piece of the prefix, and its lse. Frees the keys and values on return."""
        rows, _ = self._layout.gather(step.kv[self.group].kv[self.index], piece.slots)
        k, v = self._keys_and_values(rows.squeeze(1))
        del rows
        both: tuple[torch.Tensor, torch.Tensor] = self._full[step.bucket](
            q, k, v, piece.q_start, piece.k_start, piece.longest
        )
        return both

    def _keys_and_values(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [L, heads, plain + rotated] and values [L, heads, value] from latent rows [L, latent + rotated]."""
        n = self.sizes
        latent, turned = row.split_with_sizes((n.latent, n.rotated), 1)
        both = self.kv_b_proj(latent, Rows(bucket_of(row.shape[0]))).view(-1, n.heads, n.plain + n.value)
        plain, values = both.split_with_sizes((n.plain, n.value), 2)
        return torch.cat((plain, turned.unsqueeze(1).expand(-1, n.heads, -1)), -1), values


def _wrap(kernels: AttentionKernels, *, sizes: LatentSizes, granule: int, expands: bool) -> AttentionKernels:
    room = Room(sizes)
    prefill = tuple(LatentPrefill(kernel, room, granule, expands) for kernel in kernels.prefill)
    return kernels._replace(prefill=prefill)


def _halves(plain: int, rotated: int) -> torch.Tensor:
    """The order [plain + rotated] that keeps `plain` outputs and splits the rotated pairs after them into halves."""
    return torch.cat((torch.arange(plain), plain + apart(rotated)))
