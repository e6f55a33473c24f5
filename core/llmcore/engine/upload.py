"""The upload of a step: its rows for the kernels, and the changes of the device's tables of running requests.

The host packs both into int32 buffers in pinned memory and copies each buffer once. Rows are padded to the sizes of a
captured step if there is one. The host never reads the tables back: index ops scatter the columns with their changes,
in the device's own order of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmcore.api.protocols import AttnRows, Device, Int32
from llmcore.api.specs import bucket_of
from llmcore.layers.build import AttentionKernels
from llmcore.layers.layout import zeros
from llmcore.sched.plan import Admitted, Frame, StepPlan, TableWrites

COUNTS = ("lengths", "computed", "prompt_len")
INTS = ("top_k", "choice", "repeat_from", "count_from", "seed_low", "seed_high")
FLOATS = ("temperature", "top_p", "min_p", "typical_p", "repetition", "presence", "frequency")

_ALIGNED = 16
"""Numbers between the beginnings of two columns: kernels read faster from addresses that are multiples of 64 bytes."""
_EVEN = 4
"""The same for what is uploaded: kernels are compiled anew for addresses that are not multiples of 16 bytes."""


class Upload:
    """One step's columns on their way to the device. `put` on the host, `send` once, then `get` on the device.

    The device's copy keeps its address until more is sent than fits, so a graph can read it step after step. On the
    host there are `turns` buffers, because the device may still be copying from the last step's. `put` calls nothing
    of the device: what does not fit goes on in plain memory, until `send` makes room for it on both sides.
    """

    def __init__(self, device: Device, capacity: int, turns: int) -> None:
        self._device = device
        self._turns = turns
        self._turn = 0
        self._columns: dict[str, tuple[int, int]] = {}
        self._used = 0
        self._moved = 0
        self._sealed: tuple[object, ...] = ()
        self._reserve(capacity)

    @property
    def layout(self) -> tuple[object, ...]:
        """The places of the sealed columns: equal for two steps whose columns a graph finds in the same places."""
        return (self._moved, self._sealed)

    def seal(self) -> None:
        """End the columns that a graph reads; later ones are for work outside it."""
        self._sealed = tuple(self._columns.items())

    def clear(self) -> None:
        """Forget the last step's columns. The device must be done with the host's buffer of `turns` steps ago."""
        self._turn = (self._turn + 1) % self._turns
        self._host = self._hosts[self._turn][1]
        self._columns = {}
        self._used = 0

    def put(self, name: str, values: Int32) -> None:
        """Add a column; a name is used once per step."""
        start = -(-self._used // _EVEN) * _EVEN
        end = start + values.size
        if end > self._host.size:
            self._host = np.concatenate((self._host[: self._used], np.empty(max(end, self._host.size), np.int32)))
        self._host[start:end] = values
        self._columns[name] = (start, end)
        self._used = end

    def send(self) -> None:
        """Start the copy; what is enqueued after it sees the columns."""
        if self._host.size > self._remote.shape[0]:
            self._grow()
        if self._used:
            self._remote[: self._used].copy_(self._hosts[self._turn][0][: self._used], non_blocking=True)

    def get(self, name: str) -> Tensor:
        """A column on the device, int32."""
        start, end = self._columns[name]
        return self._remote[start:end]

    def _reserve(self, capacity: int) -> None:
        hosts = [self._device.pinned(torch.empty(capacity, dtype=torch.int32)) for _ in range(self._turns)]
        self._hosts: list[tuple[Tensor, Int32]] = [(host, host.numpy()) for host in hosts]
        self._host = self._hosts[self._turn][1]
        self._remote = torch.empty(capacity, dtype=torch.int32, device=self._device.torch_device)
        self._moved += 1

    def _grow(self) -> None:
        self._device.synchronize()  # the other turns' buffers may still be on their way
        packed = self._host
        self._reserve(packed.size)
        self._host[: self._used] = packed[: self._used]


class Scoped:
    """A MetaWriter into an Upload: one attention kernel's names, kept apart from all others."""

    def __init__(self, upload: Upload, scope: str) -> None:
        self._upload = upload
        self._scope = scope
        self._names: list[str] = []

    def put(self, name: str, values: Int32) -> None:
        """Upload `values` for this kernel."""
        self._upload.put(f"{self._scope}/{name}", values)
        self._names.append(name)

    def tensors(self) -> dict[str, Tensor]:
        """The columns that were put, on the device."""
        return {name: self._upload.get(f"{self._scope}/{name}") for name in self._names}


class Tables:
    """Rows are request indices, below `max_requests`; a request has at most `max_len` tokens.

    One more row, `scratch`, stands for the padding of captured steps: it is never admitted and computes nothing.
    `history` [rows, max_len] int32: ids known so far, of which `lengths` are valid and `computed` have KV. `granules`:
    per KV group [rows, places] int32. `floats`, `ints`: sampling parameters, one row per name of FLOATS and INTS. All
    but `granules` are parts of one tensor, so that one write sets an admitted request.
    """

    def __init__(self, device: Device, max_requests: int, max_len: int, granule_sizes: tuple[int, ...]) -> None:
        where = device.torch_device
        self.scratch = max_requests
        rows = max_requests + 1
        self._width = -(-rows // _ALIGNED) * _ALIGNED
        self._history_at = (len(COUNTS) + len(INTS) + len(FLOATS)) * self._width
        size = self._history_at + rows * max_len
        if size >= 1 << 31:
            raise ValueError(f"{max_requests} requests of {max_len} tokens are more than int32 can number")
        self.max_len = max_len
        self.granules = [zeros((rows, -(-max_len // granule)), torch.int32, where) for granule in granule_sizes]
        self._state = zeros((size,), torch.int32, where)
        columns = self._state[: self._history_at].view(-1, self._width)[:, :rows]
        self.lengths, self.computed, self.prompt_len = columns[: len(COUNTS)].unbind(0)
        self.ints = columns[len(COUNTS) : -len(FLOATS)]
        self.floats = columns[-len(FLOATS) :].view(torch.float32)
        self.history = self._state[self._history_at :].view(rows, max_len)

    def pack(self, admitted: list[Admitted], writes: list[TableWrites], upload: Upload) -> None:
        """Host: put the changes of a step."""
        for group, write in enumerate(writes):
            width = self.granules[group].shape[1]
            upload.put(f"writes{group}", write.index * np.int32(width) + write.at)
            upload.put(f"granules{group}", write.granule)
        if admitted:
            self._pack_admitted(admitted, upload)

    def apply(self, n_admitted: int, writes: list[TableWrites], upload: Upload) -> None:
        """Device: scatter the changes of a step."""
        for group, write in enumerate(writes):
            if write.index.size:
                self.granules[group].view(-1)[upload.get(f"writes{group}")] = upload.get(f"granules{group}")
        if n_admitted:
            self._state[upload.get("state_at")] = upload.get("state")

    def _pack_admitted(self, admitted: list[Admitted], upload: Upload) -> None:
        columns = _columns(admitted)
        index, lengths = np.array([a.index for a in admitted], np.int32), columns[:, COUNTS.index("lengths")]
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        base = np.repeat(index * np.int32(self.max_len) + np.int32(self._history_at) - starts, lengths)
        at = index[:, None] + np.arange(columns.shape[1], dtype=np.int32) * np.int32(self._width)
        upload.put("state_at", np.concatenate((base + np.arange(base.size, dtype=np.int32), at.reshape(-1))))
        upload.put("state", np.concatenate((*(a.tokens for a in admitted), columns.reshape(-1))))


def _columns(admitted: list[Admitted]) -> Int32:
    """[admitted, names] COUNTS, INTS, and FLOATS by their bits."""
    ints, floats = [], []
    for a in admitted:
        s = a.sampling
        repeat_from = 0 if s.repetition_over_prompt or s.penalize_prompt else a.prompt_len
        count_from = 0 if s.penalize_prompt else a.prompt_len
        ints.append((len(a.tokens), a.start, a.prompt_len, max(s.top_k, 0), a.choice, repeat_from, count_from))
        temperature = 0.0 if s.greedy else s.temperature
        penalties = s.repetition_penalty, s.presence_penalty, s.frequency_penalty
        floats.append((temperature, s.top_p, s.min_p, s.typical_p, *penalties))
    seeds = np.array([a.sampling.seed & (1 << 64) - 1 for a in admitted], np.uint64).view(np.int32).reshape(-1, 2)
    return np.concatenate((np.array(ints, np.int32), seeds, np.array(floats, np.float32).view(np.int32)), axis=1)


Meta = dict[str, Tensor]
"""The `meta` of AttentionKernel.run."""


@dataclass(frozen=True)
class Packed:
    """The columns of a step in `upload`."""

    upload: Upload
    sizes: Frame
    """Their sizes, padding included; if `mixed`, all rows go through one kernel."""
    n_decode: int
    """Rows that decode; they come first."""
    every: bool
    """Each token is sampled, in order."""
    keys: tuple[str, ...]
    """The graph keys of the attention kernels' plans, "" where one says that this step cannot be captured."""
    scopes: Mapping[tuple[str, str], Scoped]
    """By KV group and part of the rows: decode and prefill, or mixed."""

    def metas(self, group: str, table: Tensor, kv_len: Tensor) -> tuple[Meta, Meta, Meta | None]:
        """`meta` of a group's decode, prefill and mixed kernels; `kv_len` [R]."""
        get, n = self.upload.get, self.n_decode
        request, q_start = get("request"), get("q_start")
        if self.sizes.mixed:
            rows = {"table": table, "request": request, "kv_len": kv_len, "q_start": q_start}
            return {}, {}, {**rows, **self.scopes[group, "mixed"].tensors()}
        decode = {"table": table, "request": request[:n], "kv_len": kv_len[:n], "q_start": q_start[: n + 1]}
        prefill = {"table": table, "request": request[n:], "kv_len": kv_len[n:], "q_start": get("prefill_start")}
        scopes = self.scopes[group, "decode"], self.scopes[group, "prefill"]
        return {**decode, **scopes[0].tensors()}, {**prefill, **scopes[1].tensors()}, None


class BatchPacker:
    """Packs plans for a model's attention kernels. `scratch`: the request that stands for padding."""

    def __init__(self, kernels: Mapping[str, AttentionKernels], groups: Sequence[str], scratch: int) -> None:
        self._kernels = kernels
        self._groups = groups
        self._scratch = scratch

    def pack(self, plan: StepPlan, frame: Frame | None, upload: Upload) -> Packed:
        """Put every column of the step; `frame`: the sizes to pad to. Padding comes last and belongs to `scratch`."""
        given, samples = plan.request.size, plan.sample_row.size
        row = np.repeat(np.arange(given, dtype=np.int32), plan.n_query)
        sizes = Frame(given, row.size, samples, mixed=False) if frame is None else frame
        n_query = padded_to(sizes.rows, plan.n_query)
        rows = AttnRows(n_query=n_query, kv_len=padded_to(sizes.rows, plan.start + plan.n_query))
        borders = np.concatenate((np.zeros(1, np.int32), np.cumsum(n_query, dtype=np.int32)))
        n_decode, q_start = plan.n_decode, borders
        offset = np.arange(row.size, dtype=np.int32) - borders[row]
        if frame is not None and not frame.mixed:
            # Without a mixed kernel rows are split where the decode rows end; padding of a decode step decodes too.
            n_decode, q_start = frame.rows, np.arange(frame.rows + 1, dtype=np.int32)
            row = q_start[:-1]
        upload.put("request", padded_to(sizes.rows, plan.request, self._scratch))
        upload.put("n_query", n_query)
        upload.put("q_start", q_start)
        if not sizes.mixed:
            upload.put("prefill_start", borders[n_decode:] - borders[n_decode])
        upload.put("row", padded_to(sizes.tokens, row, given))
        upload.put("offset", padded_to(sizes.tokens, offset))
        upload.put("sampled", padded_to(sizes.samples, borders[plan.sample_row + 1] - 1))
        upload.put("sample_request", padded_to(sizes.samples, plan.sample_request, self._scratch))
        keys, scopes = self._planned(rows, n_decode, sizes, upload)
        every = not sizes.mixed and plan.n_decode == given == samples
        return Packed(upload, sizes, n_decode, every, keys, scopes)

    def _planned(
        self, rows: AttnRows, n_decode: int, sizes: Frame, upload: Upload
    ) -> tuple[tuple[str, ...], Mapping[tuple[str, str], Scoped]]:
        """The graph keys and the scopes of all attention kernels, after they have planned."""
        split = {"mixed": rows}
        if not sizes.mixed:
            split = {
                "decode": AttnRows(n_query=rows.n_query[:n_decode], kv_len=rows.kv_len[:n_decode]),
                "prefill": AttnRows(n_query=rows.n_query[n_decode:], kv_len=rows.kv_len[n_decode:]),
            }
        bucket = bucket_of(sizes.tokens)
        keys, scopes = [], {}
        for group in self._groups:
            kernels = self._kernels.get(group)
            for part, some in split.items():
                scope = scopes[group, part] = Scoped(upload, f"{group}/{part}")
                if kernels is not None and some.n_query.size:
                    keys.append(getattr(kernels, part)[bucket].plan(some, scope))
        return tuple(keys), scopes


def padded_to(size: int, values: Int32, filling: int = 0) -> Int32:
    """`values`, and `filling` after them up to `size`."""
    if values.size == size:
        return values
    padded = np.full(size, filling, np.int32)
    padded[: values.size] = values
    return padded
