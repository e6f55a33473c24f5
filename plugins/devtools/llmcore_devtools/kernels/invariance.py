"""Do a row's results have the same bits alone and in a batch? For batch-invariant kernels, under `deterministic`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from llmcore.api.protocols import AttentionKernel, AttnLimits, AttnRows
from llmcore.ops.attention_cases import AttnCase, Uploads

from llmcore_devtools.kernels.compare import moved

ROW_ARGUMENTS: Mapping[str, int] = {
    "linear": 1,
    "linear_silu_and_mul": 1,
    "rms_norm": 1,
    "add_rms_norm": 2,
    "layer_norm": 1,
    "add_layer_norm": 2,
    "silu_and_mul": 1,
    "gelu_tanh": 1,
    "gelu_and_mul": 1,
    "rope": 3,
}
"""Op of plain rows -> the number of its first arguments that have one row per token."""

MOST = 6
"""Most rows of a sample that are computed again, beside the last one."""


def check_invariance(op: str, kernel: Any, alone: Any, sample: tuple[Any, ...], device: torch.device) -> None:
    """Compare the rows of a sample with themselves computed alone. `alone`: the kernel made for one token.

    Raises AssertionError that names the first row that differs. Ops without plain rows pass.
    """
    if isinstance(sample[0], AttnCase):
        _attention(kernel, alone, moved(sample[0], device))
    elif op in ROW_ARGUMENTS:
        _rows(kernel, alone, sample, ROW_ARGUMENTS[op], device)


def _rows(kernel: Any, alone: Any, sample: tuple[Any, ...], count: int, device: torch.device) -> None:
    whole = _tuple(kernel(*moved(sample, device)))
    tokens = len(sample[0])
    for row in sorted({*range(0, tokens, -(-tokens // MOST)), tokens - 1}):
        part = (*(argument[row : row + 1] for argument in sample[:count]), *sample[count:])
        for together, single in zip(whole, _tuple(alone(*moved(part, device))), strict=True):
            _same(f"token {row} of {tokens}", together[row : row + 1], single)


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _attention(kernel: AttentionKernel, alone: AttentionKernel, case: AttnCase) -> None:
    whole = _run(kernel, case)
    for row, first, count in _parts(case):
        start = int(case.meta["q_start"][row]) + first
        got = _run(kernel if count > 1 else alone, _part(case, row, first, count, start))
        _same(f"row {row}, query {first} of {case.rows.n_query[row]}", whole[start : start + count], got)


def _parts(case: AttnCase) -> Iterator[tuple[int, int, int]]:
    """(row, first query, queries): some rows as a whole, their first halves, and their last queries."""
    rows = [row for row, n in enumerate(case.rows.n_query) if n]
    for row in sorted({*rows[:2], *rows[-2:]}):
        n = int(case.rows.n_query[row])
        yield row, 0, n
        if n > 1:
            yield row, 0, n // 2
            yield row, n - 1, 1


def _part(case: AttnCase, row: int, first: int, count: int, start: int) -> AttnCase:
    """A case of some queries of one row, as in a chunk of a prompt or in a decode step."""
    kv_len = int(case.rows.kv_len[row]) - int(case.rows.n_query[row]) + first + count
    tokens, where = slice(start, start + count), case.q.device
    ints = {"q_start": [0, count], "kv_len": [kv_len]}
    meta = {name: torch.tensor(values, dtype=torch.int32, device=where) for name, values in ints.items()}
    return replace(
        case,
        q=case.q[tokens],
        k_new=case.k_new[tokens],
        v_new=None if case.v_new is None else case.v_new[tokens],
        meta={"table": case.meta["table"], "request": case.meta["request"][row : row + 1], **meta},
        rows=AttnRows(n_query=np.array([count], np.int32), kv_len=np.array([kv_len], np.int32)),
    )


def _run(kernel: AttentionKernel, case: AttnCase) -> torch.Tensor:
    meta = dict(case.meta)
    kernel.workspace(AttnLimits(rows=len(case.rows.n_query), tokens=len(case.q), kv_len=int(case.rows.kv_len.max())))
    kernel.plan(case.rows, Uploads(meta))
    return kernel.run(case.q, case.k_new, case.v_new, case.kv, meta, case.out())


def _same(what: str, together: torch.Tensor, alone: torch.Tensor) -> None:
    if not torch.equal(together.nan_to_num(), alone.nan_to_num()):
        error = float((together.float() - alone.float()).abs().max())
        raise AssertionError(f"{what} has other bits alone, up to {error:.3g} off")
