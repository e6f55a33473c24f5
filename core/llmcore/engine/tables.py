"""What the device remembers of running requests, and the one upload per step that changes it.

The host never reads these tables back. It packs a step's changes into one int32 buffer in pinned memory, copies it
once, and scatters its columns with index ops, in the device's own order of steps.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcore.layers.layout import zeros
from llmcore.protocols import Device, Int32
from llmcore.sched.plan import Admitted, TableWrites

FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
COLDEST = 1e-5
"""Temperatures below this are greedy, as in LightLLM: scores divided by much less would leave float32."""

INTS = ("top_k", "seed_low", "seed_high", "choice", "repeat_from", "count_from")


class Upload:
    """One step's columns on their way to the device. `put` on the host, `send` once, then `get` on the device.

    The device's copy stays where it is until more is put than fits, so a graph can read it step after step; on the
    host there are `turns` buffers, because the device may still be copying from the last step's.
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
        """Where the sealed columns lie: equal for two steps whose columns a graph finds in the same places."""
        return (self._moved, self._sealed)

    def seal(self) -> None:
        """What is put from now on is not for a graph."""
        self._sealed = tuple(self._columns.items())

    def clear(self) -> None:
        """Forget the last step's columns. The device must be done with the host's buffer of `turns` steps ago."""
        self._turn = (self._turn + 1) % self._turns
        self.restart()

    def restart(self) -> None:
        """Begin this step's columns anew; nothing was sent yet."""
        self._columns = {}
        self._used = 0

    def put(self, name: str, values: Int32) -> None:
        """Add a column; a name is used once per step."""
        end = self._used + values.size
        if end > self._remote.shape[0]:
            self._grow(end)
        self._hosts[self._turn][1][self._used : end] = values
        self._columns[name] = (self._used, end)
        self._used = end

    def send(self) -> None:
        """Start the copy; what is enqueued after it sees the columns."""
        if self._used:
            self._remote[: self._used].copy_(self._hosts[self._turn][0][: self._used], non_blocking=True)

    def has(self, name: str) -> bool:
        """Whether this step has the column."""
        return name in self._columns

    def get(self, name: str) -> Tensor:
        """A column on the device, int32."""
        start, end = self._columns[name]
        return self._remote[start:end]

    def get_float(self, name: str) -> Tensor:
        """A column that was put as the bits of f32 values."""
        return self.get(name).view(torch.float32)

    def _reserve(self, capacity: int) -> None:
        hosts = [self._device.pinned(torch.empty(capacity, dtype=torch.int32)) for _ in range(self._turns)]
        self._hosts: list[tuple[Tensor, Int32]] = [(host, host.numpy()) for host in hosts]
        self._remote = torch.empty(capacity, dtype=torch.int32, device=self._device.torch_device)
        self._moved += 1

    def _grow(self, needed: int) -> None:
        self._device.synchronize()  # the other turns' buffers may still be on their way
        packed = self._hosts[self._turn][1][: self._used].copy()
        self._reserve(max(needed, 2 * self._remote.shape[0]))
        self._hosts[self._turn][1][: self._used] = packed


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
        """What was put, on the device."""
        return {name: self._upload.get(f"{self._scope}/{name}") for name in self._names}


class Tables:
    """Rows are request indices, below `max_requests`; a request has at most `max_len` tokens.

    One more row, `scratch`, stands for the padding of captured steps: it is never admitted and computes nothing.
    `history` [rows, max_len] int32: ids known so far, of which `lengths` are valid and `computed` have KV. `granules`:
    per KV group [rows, places] int32. `floats`, `ints`: sampling parameters, one row per name of FLOATS and INTS.
    """

    def __init__(self, device: Device, max_requests: int, max_len: int, granule_sizes: tuple[int, ...]) -> None:
        where = device.torch_device

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return zeros(shape, dtype, where)

        self.scratch = max_requests
        rows = max_requests + 1
        if rows * max_len >= 1 << 31:
            raise ValueError(f"{max_requests} requests of {max_len} tokens are more than int32 can number")
        self.max_len = max_len
        self.granules = [table(rows, -(-max_len // size)) for size in granule_sizes]
        self.history = table(rows, max_len)
        self.lengths = table(rows)
        self.computed = table(rows)
        self.prompt_len = table(rows)
        self.floats = table(len(FLOATS), rows, dtype=torch.float32)
        self.ints = table(len(INTS), rows)

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
            index = upload.get("admitted")
            self.history.view(-1)[upload.get("history_at")] = upload.get("history")
            self.lengths[index] = upload.get("lengths")
            self.computed[index] = upload.get("computed")
            self.prompt_len[index] = upload.get("prompt_len")
            self.floats[:, index] = upload.get_float("floats").view(len(FLOATS), n_admitted)
            self.ints[:, index] = upload.get("ints").view(len(INTS), n_admitted)

    def _pack_admitted(self, admitted: list[Admitted], upload: Upload) -> None:
        lengths = np.array([len(a.tokens) for a in admitted], np.int32)
        index = np.array([a.index for a in admitted], np.int32)
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        upload.put("admitted", index)
        upload.put("history", np.concatenate([a.tokens for a in admitted]))
        base = np.repeat(index * np.int32(self.max_len) - starts, lengths)
        upload.put("history_at", base + np.arange(base.size, dtype=np.int32))
        upload.put("lengths", lengths)
        upload.put("computed", np.array([a.start for a in admitted], np.int32))
        upload.put("prompt_len", np.array([a.prompt_len for a in admitted], np.int32))
        upload.put("floats", _floats(admitted).view(np.int32).reshape(-1))
        upload.put("ints", _ints(admitted).reshape(-1))


def _floats(admitted: list[Admitted]) -> NDArray[np.float32]:
    rows = [
        (
            s.temperature if s.temperature >= COLDEST else 0.0,
            *(s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty),
        )
        for s in (a.sampling for a in admitted)
    ]
    return np.ascontiguousarray(np.array(rows, np.float32).T)


def _ints(admitted: list[Admitted]) -> Int32:
    rows = []
    for a in admitted:
        s = a.sampling
        words = np.array([s.seed & (1 << 64) - 1], np.uint64).view(np.int32)
        repeat_from = 0 if s.repetition_over_prompt or s.penalize_prompt else a.prompt_len
        count_from = 0 if s.penalize_prompt else a.prompt_len
        rows.append((max(s.top_k, 0), int(words[0]), int(words[1]), a.choice, repeat_from, count_from))
    return np.ascontiguousarray(np.array(rows, np.int32).T)
