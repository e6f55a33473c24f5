"""Plans as plain data, and the sizes that captured steps are padded to."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from llmcore.api.bridge import LengthDecay, SamplingParams
from llmcore.sched.plan import Frame, Pool, Probe, StepPlan, Want, decode, encode, frame_of, padded


def plan(n_query: list[int], n_decode: int, samples: int) -> StepPlan:
    rows = np.arange(len(n_query), dtype=np.int32)
    return StepPlan(
        number=0,
        request=rows,
        n_query=np.array(n_query, np.int32),
        reserve=np.array(n_query, np.int32),
        start=np.zeros_like(rows),
        want=np.zeros(rows.size, np.uint8),
        n_decode=n_decode,
        sample_row=rows[:samples],
        sample_request=rows[:samples],
    )


def test_sizes() -> None:
    sizes = {rows: padded(rows) for rows in (1, 2, 3, 5, 8, 9, 33, 64, 65, 81, 256, 257)}
    assert list(sizes.values()) == [1, 2, 4, 8, 8, 16, 40, 64, 80, 96, 256, 320]


@pytest.mark.parametrize(
    ("n_query", "n_decode", "samples", "frame"),
    [
        ([1, 1, 1], 3, 3, Frame(4, 4, 4, mixed=False)),
        ([1] * 16, 16, 16, Frame(16, 16, 16, mixed=False)),
        ([1] * 17, 17, 17, None),
        ([1, 1, 9], 2, 3, Frame(16, 16, 4, mixed=True)),
        ([1, 15], 1, 2, Frame(16, 16, 2, mixed=True)),
        ([1, 16], 1, 2, Frame(32, 32, 2, mixed=True)),
        ([1, 511], 1, 2, Frame(512, 512, 2, mixed=True)),
        ([300], 0, 1, Frame(320, 320, 1, mixed=True)),
        ([300], 0, 0, Frame(320, 320, 0, mixed=True)),
        ([1, 512], 1, 2, None),
    ],
)
def test_frames(n_query: list[int], n_decode: int, samples: int, frame: Frame | None) -> None:
    assert frame_of(plan(n_query, n_decode, samples), 16) == frame


@pytest.mark.parametrize("name", ["probes", "pools"])
def test_a_step_that_reads_a_prompt_is_not_captured(name: str) -> None:
    asks = plan([9], 0, 1)
    setattr(asks, name, [{"probes": Probe(0, np.ones(8, np.int32)), "pools": Pool(0, 0)}[name]])
    assert frame_of(asks, 16) is None


def test_without_graphs_no_step_is_captured() -> None:
    assert frame_of(plan([1, 1], 2, 2), 0) is None


def test_a_plan_is_the_same_after_a_journey(bench: Any) -> None:
    """Prefill, forks, writes, copies, probes, pools, late rows, masks, sampling parameters, and a graph's sizes."""
    b = bench(granule=4, graph_rows=8)
    sampling = SamplingParams(logit_bias={3: 1.5}, length_decay=LengthDecay(1, 1.5, (2, 3)), allowed_ids=(1, 2))
    b.submit(1, range(6), n=2, sampling=sampling, stop_ids=(7, 9), min_new_tokens=3)
    b.submit(2, range(20, 30), prompt_logprobs=True, prompt_top=2)
    b.submit(3, range(40, 45), pool="mean", max_new=1)
    b.submit(4, range(50, 53), score=True, max_new=1)
    plans = [b.plan()]
    assert plans[0].frame is None and plans[0].probes and plans[0].pools and plans[0].want.tolist()[0] == Want.SCORE
    b.commit(plans[0], token=1)
    plans.append(b.step(token=1))
    assert plans[1].copies[0] and plans[1].frame == Frame(4, 4, 4, mixed=False)
    for plan in plans:
        assert same(decode(encode(plan)), plan)


def same(found: Any, wanted: Any) -> bool:
    """Equal in every column and every type."""
    if isinstance(wanted, np.ndarray):
        return bool(found.dtype == wanted.dtype and np.array_equal(found, wanted))
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, msgspec.Struct):
        names = wanted.__struct_fields__
        return type(found) is type(wanted) and all(same(getattr(found, n), getattr(wanted, n)) for n in names)
    return bool(found == wanted)


@pytest.mark.parametrize("column", [np.zeros(2, np.int64), np.zeros((2, 2), np.int32), threading.Lock()])
def test_nothing_else_is_sent(column: Any) -> None:
    odd = plan([1], 1, 1)
    odd.late = column
    with pytest.raises(TypeError, match="columns of int32"):
        encode(odd)
