"""The lists of work that the attention kernels get: everything once, whatever the true lengths are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from llmcore.api import AttnLimits, AttnRows
from llmcore_triton.attention.work import FIELDS, Planner, Work

LIMITS = AttnLimits(rows=64, tokens=512, kv_len=4096)


def planner(
    items: int = 24, tokens: int | None = None, window: int | None = None, fixed: int | None = None
) -> Planner:
    made = Planner(items=items, block=16, least=32, tokens=tokens, window=window, fixed=fixed)
    made.reserve(LIMITS)
    return made


def rows(n_query: Sequence[int], kv_len: Sequence[int]) -> AttnRows:
    return AttnRows(n_query=np.array(n_query, np.int32), kv_len=np.array(kv_len, np.int32))


def read(work: Work, made: Planner, step: AttnRows, spare: int) -> None:
    """Do on the host what the kernel does, with every row `spare` tokens shorter than planned for."""
    items = work.items.reshape(-1, FIELDS)
    chunk, tokens = int(items[0, 0]), made.tokens or 1
    align = made.fixed or made.block
    seen: dict[tuple[int, int], list[int]] = {}
    places: set[int] = set()
    for row, tile, place, at in items[1:].tolist():
        if row < 0:
            continue
        n = int(step.n_query[row])
        length = max(int(step.kv_len[row]) - spare, n)
        query = length - n + tile * tokens
        end = min(query + tokens, length)
        first = 0 if made.window is None else max(query - made.window + 1, 0) // align * align
        start, stop = (first, end) if place < 0 else (first + place * chunk, min(first + (place + 1) * chunk, end))
        if start >= stop:
            continue
        seen.setdefault((row, tile), []).extend(range(start, stop))
        if (start, stop) != (first, end):
            mine = set(range(at, at + min(tokens, n - tile * tokens)))
            assert not mine & places
            assert max(mine) < made.room
            if made.tokens is None and place >= 0:
                assert work.firsts[row] == at - place
            places |= mine
            if made.fixed:
                assert start % made.fixed == 0
    for row, (n, kv_len) in enumerate(zip(step.n_query.tolist(), step.kv_len.tolist(), strict=True)):
        length = max(kv_len - spare, n)
        for tile in range(-(-n // tokens)):
            query = length - n + tile * tokens
            first = 0 if made.window is None else max(query - made.window + 1, 0) // align * align
            assert seen.pop((row, tile)) == list(range(first, min(query + tokens, length)))
    assert not seen


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("fixed", [None, 64])
@pytest.mark.parametrize("tokens", [None, 4])
def test_every_token_is_read_once(window: int | None, fixed: int | None, tokens: int | None) -> None:
    random = np.random.default_rng(1)
    made = planner(tokens=tokens, window=window, fixed=fixed)
    for _ in range(40):
        n_query = np.ones(int(random.integers(1, 40)), np.int32)
        if tokens is not None:
            n_query = random.integers(0, 20, len(n_query), np.int32)
        kv_len = n_query + random.integers(0, 4 ** random.integers(1, 6, len(n_query)), dtype=np.int32)
        kv_len[n_query == 0] = 0
        step = rows(n_query.tolist(), kv_len.tolist())
        work = made.plan(step)
        if work is not None:
            assert len(work.items) == (work.size + 1) * FIELDS
            for spare in (0, 1, 17):
                read(work, made, step, spare)
        else:
            assert tokens is None


def test_one_long_row_beside_short_ones_is_split_evenly() -> None:
    made = planner(items=50)
    work = made.plan(rows([1] * 64, [300] * 63 + [32768]))
    assert work is not None
    items = work.items.reshape(-1, FIELDS)
    long = int((items[1:, 0] == 63).sum())
    assert long > 20
    assert int((items[1:, 0] >= 0).sum()) == 63 + long


def test_rows_that_fill_the_processors_are_not_split() -> None:
    assert planner(items=50).plan(rows([1] * 64, [576] * 64)) is None


def test_many_uneven_rows_begin_with_the_longest() -> None:
    made, lengths = planner(items=8), [100, 700, 30, 400] * 16
    work = made.plan(rows([1] * 64, lengths))
    assert work is not None
    assert not work.split
    assert work.size == 64
    order = [lengths[row] for row in work.items.reshape(-1, FIELDS)[1:, 0].tolist()]
    assert order == sorted(lengths, reverse=True)
    at_once = planner(items=64).plan(rows([1] * 64, lengths))
    assert at_once is not None  # all begin together, so that the longest are cut instead
    assert at_once.split


def test_a_step_has_one_of_few_sizes() -> None:
    made = planner(items=50)
    sizes = {
        work.size
        for longest in range(1, 4096, 37)
        if (work := made.plan(rows([1] * 8, [longest] * 4 + [longest // 3 + 1] * 4))) is not None
    }
    assert sizes <= {50, 100}
    mixed = planner(items=50, tokens=16)
    works = [mixed.plan(rows([n, 1, 1], [1000 + n, 700, 30])) for n in range(1, 500, 7)]
    assert {work.size for work in works if work is not None} <= {50, 100, 200}


@pytest.mark.parametrize("fixed", [None, 64])
def test_partial_results_never_need_more_room_than_there_is(fixed: int | None) -> None:
    made = planner(items=500, tokens=16, fixed=fixed)
    made.room = 100
    step = rows([200, 30, 1], [2000, 4000, 4000])
    work = made.plan(step)
    assert work is not None
    read(work, made, step, 0)


def test_padding_rows_are_no_work() -> None:
    for made in (planner(), planner(tokens=4), planner(tokens=4, fixed=64)):
        work = made.plan(rows([1, 1, 0, 0], [900, 3, 0, 0]))
        assert work is not None
        assert set(work.items.reshape(-1, FIELDS)[1:, 0].tolist()) == {-1, 0, 1}
    made = planner(tokens=4)
    work = made.plan(rows([0, 0], [0, 0]))
    assert work is not None
    assert set(work.items.reshape(-1, FIELDS)[1:, 0].tolist()) == {-1}
