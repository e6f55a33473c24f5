"""A plan's rows as columns of one upload, padded to the sizes of a captured step where there are such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from llmcore.api.protocols import AttentionKernel, AttnRows, Int32
from llmcore.api.specs import bucket_of
from llmcore.engine.tables import Scoped, Upload
from llmcore.layers.build import AttentionKernels
from llmcore.sched.plan import Frame, StepPlan


@dataclass(frozen=True)
class Packed:
    """The columns of a step in `upload`, and their sizes."""

    upload: Upload
    n_decode: int
    """Rows that decode; they come first."""
    n_tokens: int
    n_samples: int
    mixed: bool
    """All rows go through one kernel."""
    every: bool
    """Each token is sampled, in order."""
    keys: tuple[str, ...]
    """The graph keys of the attention kernels' plans."""
    scratch: int
    """The request index of padding."""
    scopes: Mapping[str, tuple[Scoped, Scoped, Scoped]]

    def metas(
        self, group: str, table: Tensor, kv_len: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor] | None]:
        """`meta` of a group's decode, prefill and mixed kernels; `kv_len` [R]."""
        get, n = self.upload.get, self.n_decode
        request = get("request")
        scopes = self.scopes[group]
        rows = {"table": table, "request": request, "kv_len": kv_len, "q_start": get("q_start")}
        if self.mixed:
            return {}, {}, {**rows, **scopes[2].tensors()}
        decode = {**rows, "request": request[:n], "kv_len": kv_len[:n], "q_start": get("q_start")[: n + 1]}
        prefill = {**rows, "request": request[n:], "kv_len": kv_len[n:], "q_start": get("prefill_start")}
        return {**decode, **scopes[0].tensors()}, {**prefill, **scopes[1].tensors()}, None


@dataclass(frozen=True)
class _Rows:
    """The rows of a step, padding included: it comes last and belongs to the request `scratch`."""

    request: Int32
    n_query: Int32
    kv_len: Int32
    borders: Int32


class BatchPacker:
    """Packs plans for a model's attention kernels. `scratch`: the request that stands for padding."""

    def __init__(self, kernels: Mapping[str, AttentionKernels], groups: Sequence[str], scratch: int) -> None:
        self._kernels = kernels
        self._groups = groups
        self._scratch = scratch

    def pack(self, plan: StepPlan, frame: Frame | None, upload: Upload) -> Packed:
        """Put every column of the step; `frame`: the sizes to pad to."""
        rows = self._rows(plan, frame)
        n_tokens = plan.n_tokens if frame is None else frame.tokens
        mixed = frame is not None and frame.mixed
        # Without a mixed kernel rows are split where the decode rows end; padding of a decode step decodes too.
        n_decode = plan.n_decode if frame is None or frame.mixed else frame.rows
        row = np.repeat(np.arange(plan.request.size, dtype=np.int32), plan.n_query)
        offset = np.arange(row.size, dtype=np.int32) - rows.borders[row]
        padding = np.arange(n_tokens - row.size, dtype=np.int32)
        first = plan.request.size
        at = np.concatenate((row, padding * 0 + first if mixed else padding + first))
        upload.put("request", rows.request)
        upload.put("n_query", rows.n_query)
        upload.put("q_start", rows.borders if mixed or frame is None else np.arange(frame.rows + 1, dtype=np.int32))
        if not mixed:
            upload.put("prefill_start", rows.borders[n_decode:] - rows.borders[n_decode])
        upload.put("row", at)
        upload.put("offset", np.concatenate((offset, padding * 0)))
        samples = self._put_samples(plan, frame, rows, upload)
        scopes = {name: self._scopes(upload, name) for name in self._groups}
        bucket = bucket_of(n_tokens)
        keys = [key for name in self._groups for key in self._plan(name, bucket, rows, n_decode, mixed, scopes[name])]
        every = bool(plan.n_decode == plan.request.size == plan.sample_row.size) and not mixed
        return Packed(upload, n_decode, n_tokens, samples, mixed, every, tuple(keys), self._scratch, scopes)

    def _rows(self, plan: StepPlan, frame: Frame | None) -> _Rows:
        more = 0 if frame is None else frame.rows - plan.request.size
        none = np.zeros(more, np.int32)
        n_query = np.concatenate((plan.n_query, none))
        return _Rows(
            request=np.concatenate((plan.request, none + np.int32(self._scratch))),
            n_query=n_query,
            kv_len=np.concatenate((plan.start + plan.n_query, none)),
            borders=np.concatenate((np.zeros(1, np.int32), np.cumsum(n_query, dtype=np.int32))),
        )

    def _put_samples(self, plan: StepPlan, frame: Frame | None, rows: _Rows, upload: Upload) -> int:
        samples = plan.sample_row.size if frame is None else frame.samples
        none = np.zeros(samples - plan.sample_row.size, np.int32)
        upload.put("sampled", np.concatenate((rows.borders[plan.sample_row + 1] - 1, none)))
        upload.put("sample_request", np.concatenate((plan.sample_request, none + np.int32(self._scratch))))
        return samples

    def _scopes(self, upload: Upload, group: str) -> tuple[Scoped, Scoped, Scoped]:
        return (
            Scoped(upload, f"{group}/decode"),
            Scoped(upload, f"{group}/prefill"),
            Scoped(upload, f"{group}/mixed"),
        )

    def _plan(
        self, group: str, bucket: int, rows: _Rows, n_decode: int, mixed: bool, scopes: tuple[Scoped, Scoped, Scoped]
    ) -> list[str]:
        """The graph keys of a group's kernels, "" where one says that this step cannot be captured."""
        kernels = self._kernels.get(group)
        if kernels is None:
            return []
        everything = slice(0, None)
        parts: list[tuple[AttentionKernel, Scoped, slice]] = [(kernels.mixed[bucket], scopes[2], everything)]
        if not mixed:
            parts = [
                (kernels.decode[bucket], scopes[0], slice(0, n_decode)),
                (kernels.prefill[bucket], scopes[1], slice(n_decode, None)),
            ]
        return [
            kernel.plan(AttnRows(n_query=rows.n_query[part], kv_len=rows.kv_len[part]), scope)
            for kernel, scope, part in parts
            if rows.n_query[part].size
        ]
