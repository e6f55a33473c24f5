"""The runner turns a StepPlan into one forward and one draw, without ever waiting for the device.

`launch` enqueues a step, `read` waits for its tokens. In between they are on the device only, where the next step
finds them in the requests' history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from llmcore.engine.sampling import RowSampler
from llmcore.engine.tables import Scoped, Tables, Upload
from llmcore.layers.build import AttentionKernels
from llmcore.layers.layout import KV, Layout
from llmcore.layers.step import KVStep, Step
from llmcore.ops.sample import Sampled
from llmcore.protocols import AttnRows, Device, Event, Int32
from llmcore.sched.plan import StepPlan, StepResult
from llmcore.specs import ModelConfig, bucket_of

_UPLOAD_INTS = 1 << 14


class Model(Protocol):
    """What a family builds, as the engine sees it (`layers.Decoder` is one).

    `attention_kernels`: by KV group, the kernels that plan on the host before a step; none for a group that needs
    no plan.
    """

    config: ModelConfig
    attention_kernels: Mapping[str, AttentionKernels]

    def __call__(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """(hidden, residual) [T, hidden size] of the step's tokens."""

    def logits(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """[S, vocabulary] of any float type, of S tokens' hidden states."""


@dataclass(frozen=True)
class GroupKV:
    """One KV group on the device: `kv` holds the layout's pools per layer index of the model."""

    name: str
    layout: Layout
    kv: Mapping[int, KV]


@dataclass(frozen=True)
class InFlight:
    """A launched step: its outcome on its way to the host, None where it samples nothing."""

    plan: StepPlan
    event: Event
    outcome: Sampled | None


class Runner:
    """Executes plans on one device, in order."""

    def __init__(
        self, model: Model, device: Device, tables: Tables, groups: Sequence[GroupKV], sampler: RowSampler
    ) -> None:
        self._model = model
        self._device = device
        self._tables = tables
        self._groups = groups
        self._sampler = sampler
        self._kernels = model.attention_kernels
        # A buffer is written again only after the step that used it was read.
        self._uploads = [Upload(device, _UPLOAD_INTS) for _ in range(device.ahead + 1)]
        self._turn = 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        """Enqueue a step. Raises what the model raises."""
        self._turn = (self._turn + 1) % len(self._uploads)
        upload = self._uploads[self._turn]
        upload.clear()
        self._tables.pack(plan.admitted, plan.writes, upload)
        self._sampler.pack(plan, upload)
        scopes = self._pack_rows(plan, upload)
        upload.send()
        self._tables.apply(len(plan.admitted), plan.writes, upload)
        self._copy_granules(plan, upload)
        step, request = self._step(plan, upload, scopes)
        hidden, residual = self._model(step)
        self._tables.computed.index_add_(0, request, upload.get("n_query"))
        outcome = self._sample(plan, step, hidden, residual, upload)
        return InFlight(plan, self._device.event(), outcome)

    def read(self, step: InFlight) -> StepResult:
        """Wait for a launched step. Raises what the device raises."""
        step.event.wait()
        out = step.outcome
        if out is None:
            return StepResult(np.empty(0, np.int32), np.empty(0, np.bool_))
        return StepResult(
            tokens=out.tokens.numpy(),
            finite=out.finite.numpy(),
            logprobs=_array(out.logprobs),
            top_ids=_array(out.top_ids),
            top_logprobs=_array(out.top_logprobs),
        )

    def _pack_rows(self, plan: StepPlan, upload: Upload) -> dict[str, tuple[Scoped, Scoped]]:
        upload.put("request", plan.request)
        upload.put("n_query", plan.n_query)
        ends = np.cumsum(plan.n_query, dtype=np.int32)
        borders = np.concatenate((np.zeros(1, np.int32), ends))
        upload.put("decode_start", borders[: plan.n_decode + 1])
        upload.put("prefill_start", borders[plan.n_decode :] - borders[plan.n_decode])
        if plan.n_decode < plan.request.size:
            row = np.repeat(np.arange(plan.request.size, dtype=np.int32), plan.n_query)
            upload.put("token_row", row)
            upload.put("offset", np.arange(row.size, dtype=np.int32) - borders[row])
        upload.put("sampled", ends[plan.sample_row] - 1)
        upload.put("sample_request", plan.sample_request)
        for group, pairs in zip(self._groups, plan.copies, strict=False):
            upload.put(f"copies/{group.name}", np.array(pairs, np.int32).T.reshape(-1))
        return {group.name: self._plan_attention(plan, group.name, upload) for group in self._groups}

    def _plan_attention(self, plan: StepPlan, group: str, upload: Upload) -> tuple[Scoped, Scoped]:
        scopes = (Scoped(upload, f"{group}/decode"), Scoped(upload, f"{group}/prefill"))
        kv_len: Int32 = plan.start + plan.n_query
        parts = (slice(0, plan.n_decode), slice(plan.n_decode, None))
        bucket = bucket_of(plan.n_tokens)
        for kernels, scope, part in zip(self._kernels.get(group, ()), scopes, parts, strict=False):
            if plan.n_query[part].size:
                kernels[bucket].plan(AttnRows(n_query=plan.n_query[part], kv_len=kv_len[part]), scope)
        return scopes

    def _copy_granules(self, plan: StepPlan, upload: Upload) -> None:
        for group, pairs in zip(self._groups, plan.copies, strict=False):
            if pairs:
                src, dst = upload.get(f"copies/{group.name}").long().view(2, len(pairs))
                for kv in group.kv.values():
                    group.layout.copy(kv, src, dst)

    def _step(
        self, plan: StepPlan, upload: Upload, scopes: Mapping[str, tuple[Scoped, Scoped]]
    ) -> tuple[Step, Tensor]:
        tables, n_decode = self._tables, plan.n_decode
        request, n_query = upload.get("request"), upload.get("n_query")
        start = tables.computed[request]
        if n_decode == plan.request.size:
            owner, position = request, start
        else:
            row = upload.get("token_row")
            owner, position = request[row], start[row] + upload.get("offset")
        kv_len = start + n_query
        decode = {"request": request[:n_decode], "q_start": upload.get("decode_start"), "kv_len": kv_len[:n_decode]}
        prefill = {"request": request[n_decode:], "q_start": upload.get("prefill_start"), "kv_len": kv_len[n_decode:]}
        kv = {}
        for group, table in zip(self._groups, tables.granules, strict=True):
            mine = scopes[group.name]
            kv[group.name] = KVStep(
                kv=group.kv,
                slots=_slots(table, owner, position, group.layout.granule),
                decode={"table": table, **decode, **mine[0].tensors()},
                prefill={"table": table, **prefill, **mine[1].tensors()},
            )
        step = Step(
            bucket=bucket_of(position.shape[0]),
            n_decode=n_decode,
            tokens=tables.history[owner, position].long(),
            positions=position.unsqueeze(0),
            prompt_len=tables.prompt_len[owner],
            sampled=upload.get("sampled").long(),
            kv=kv,
        )
        return step, request

    def _sample(
        self, plan: StepPlan, step: Step, hidden: Tensor, residual: Tensor | None, upload: Upload
    ) -> Sampled | None:
        if not plan.sample_row.size:
            return None
        hidden = hidden.index_select(0, step.sampled)
        residual = None if residual is None else residual.index_select(0, step.sampled)
        request = upload.get("sample_request").long()
        out = self._sampler.draw(self._model.logits(hidden, residual), request, plan, upload)
        at = self._tables.lengths[request]
        self._tables.history[request, at] = out.tokens
        self._tables.lengths[request] = at + 1
        return self._sampler.to_host(out)


def _slots(table: Tensor, owner: Tensor, position: Tensor, granule: int) -> Tensor:
    """[T] int64: where the KV of the token at `position` of request `owner` lies."""
    if granule == 1:
        return table[owner, position].long()
    place = torch.div(position, granule, rounding_mode="floor")
    return table[owner, place].long() * granule + position % granule


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.numpy()
