"""Requests whose KV a source writes: under a lease, in no step, runnable once it is filled."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from llmcore.api.bridge import Finish, Prompt, Submit
from llmcore.builtin.estimators import Capped
from llmcore.sched.request import Lease

Make = Any
PROMPT = range(20)


@dataclass
class Source:
    tokens: int
    seconds: float = 60.0
    open: list[Lease] = field(default_factory=list)
    cancelled: list[Lease] = field(default_factory=list)

    def begin(self, lease: Lease) -> None:
        self.open.append(lease)

    def cancel(self, lease: Lease) -> None:
        self.open.remove(lease)
        self.cancelled.append(lease)


def submit(b: Any, id: int, source: Source, prompt: Any = PROMPT, **more: Any) -> None:
    request = Submit(id=id, prompt=Prompt.of(prompt), **{"max_new_tokens": 4, **more})
    b.scheduler.submit(request, 0, source=source)


@pytest.mark.parametrize("granule", [1, 4])
def test_it_runs_when_its_range_is_filled(bench: Make, granule: int) -> None:
    b, source = bench(granule=granule), Source(14)
    submit(b, 1, source)
    assert b.scheduler.plan() is None and not b.scheduler.idle
    (lease,) = source.open
    assert (lease.request, lease.start, lease.end) == ((0, 1), 0, 14)
    assert [part.size for part in lease.granules] == [-(-14 // granule)]
    assert b.group.pool.live * granule >= 14 and b.scheduler.load().running == 1
    b.submit(2, range(50, 55), max_new=2)
    assert b.step().n_query.tolist() == [5], "others go on meanwhile"
    b.scheduler.filled(lease)
    plan = b.step()
    at = plan.request.tolist().index(plan.admitted[0].index)
    assert (plan.start[at], plan.n_query[at], plan.admitted[0].start) == (14, 6, 14)
    written = plan.writes[0]
    mine = written.granule[written.index == plan.admitted[0].index]
    assert mine[: lease.granules[0].size].tolist() == lease.granules[0].tolist(), "the device learns of its slots"
    b.drain()
    assert [event.cached for event in b.events[1]] == [0, -1, -1, -1]
    b.submit(3, PROMPT)
    assert b.step().start.tolist() == [19 // granule * granule], "what was loaded is in the prefix cache now"


def test_a_prefix_hit_is_not_written_again(bench: Make) -> None:
    b = bench()
    b.submit(1, range(10))
    b.drain()
    long, short = Source(15), Source(6)
    submit(b, 2, long)
    assert b.scheduler.plan() is None
    assert (long.open[0].start, long.open[0].end) == (10, 15)
    submit(b, 3, short)
    assert b.step().start.tolist() == [10] and not short.open, "it has all that it was to get"


def test_an_abort_gives_its_slots_back_and_stops_the_writer(bench: Make) -> None:
    b, source = bench(), Source(14)
    submit(b, 1, source)
    assert b.scheduler.plan() is None
    lease = source.open[0]
    b.scheduler.abort(0, 1)
    assert source.cancelled == [lease] and b.group.pool.live == 0 and b.scheduler.idle
    b.scheduler.filled(lease)
    assert b.scheduler.plan() is None, "a report that comes too late changes nothing"


def test_an_expired_lease_gives_its_slots_back_and_the_prompt_is_computed(bench: Make) -> None:
    b, source = bench(), Source(14, seconds=5.0)
    submit(b, 1, source, n=2)
    assert b.scheduler.plan() is None
    b.scheduler.lapse(time.monotonic())
    assert source.open and b.scheduler.plan() is None
    b.scheduler.lapse(time.monotonic() + 6.0)
    assert source.cancelled and b.group.pool.live == 0
    assert b.step().n_query.tolist() == [20]
    b.drain()
    assert sorted(event.choice for event in b.events[1] if event.finish is Finish.LENGTH) == [0, 1]


def test_it_is_cancelled_where_running_requests_need_the_slots(bench: Make) -> None:
    b, source = bench(slots=40, estimator=Capped, capped_new_tokens=1), Source(14)
    b.submit(1, range(100, 108), max_new=30, stop_ids=(999,))
    b.step()
    submit(b, 2, source)
    b.step()
    assert source.open
    while source.open:
        assert b.step().request.size == 1
    assert (b.scheduler.totals.preemptions, len(source.cancelled)) == (0, 1)
    b.drain()
    assert [len(b.events[i]) for i in (1, 2)] == [30, 4]


def test_room_is_kept_for_all_that_it_will_need(bench: Make) -> None:
    b, source = bench(slots=60), Source(14)
    submit(b, 1, source, max_new_tokens=21)
    assert b.scheduler.plan() is None
    b.submit(2, range(100, 110), max_new=15)
    assert b.scheduler.plan() is None, "20 + 20 and 10 + 14 are more than 60 if the first begins late"
    b.scheduler.filled(source.open[0])
    assert b.step().n_query.tolist() == [6, 10], "it begins now: when it ends, the other has ended long since"
    b.drain()
    assert (len(b.events[1]), len(b.events[2]), b.scheduler.totals.preemptions) == (21, 15, 0)


def test_a_failed_step_takes_loads_along_that_had_taken_from_it(bench: Make) -> None:
    b, source = bench(ahead=1), Source(15)
    b.submit(1, range(10))
    failing = b.plan()
    submit(b, 2, source)
    later = b.plan()
    assert source.open[0].start == 10
    b.scheduler.fail(failing, ("internal_error", "out of luck"))
    assert later.number > failing.number and source.cancelled and b.group.pool.live == 0
    b.drain()
    assert [len(b.events[i]) for i in (1, 2)] == [4, 4]


def test_a_prompt_that_was_computed_elsewhere_comes_with_its_first_token(bench: Make) -> None:
    """Its source writes the whole prompt; the model's first row is the token that was sampled there."""
    b, source = bench(), Source(20)
    submit(b, 1, source, produced={0: (7,)}, max_new_tokens=3)
    assert b.scheduler.plan() is None and source.open[0].end == 20
    b.scheduler.filled(source.open[0])
    plan = b.step()
    assert (plan.start.tolist(), plan.n_query.tolist()) == ([20], [1])
    b.drain()
    assert [event.tokens for event in b.events[1]] == [(7,), (7,)]
    with pytest.raises(ValueError, match="cannot write 21 of these 21 tokens"):
        submit(b, 2, Source(21), produced={0: (7,)})


@pytest.mark.parametrize(
    ("tokens", "more"), [(0, {}), (20, {}), (5, {"prompt_logprobs": True}), (5, {"pool": "mean"})]
)
def test_what_the_model_has_to_compute_itself_cannot_be_loaded(bench: Make, tokens: int, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"cannot write {tokens} of these 20 tokens"):
        submit(bench(), 1, Source(tokens), **more)


@pytest.mark.parametrize(("granule", "peak"), [(1, 25 + 7), (4, 28 + 12)])
def test_a_load_counts_all_that_it_and_its_forks_will_hold(bench: Make, granule: int, peak: int) -> None:
    """18 tokens of prompt, 6 of an answer, one step in flight: 25; a fork shares the granules of the prompt alone."""
    b = bench(granule=granule, ahead=1)
    submit(b, 1, Source(14), range(18), max_new_tokens=7, n=2)
    assert b.scheduler.plan() is None
    assert b.scheduler.load().peak == peak


def test_a_lease_expires_at_its_time(bench: Make) -> None:
    b, source = bench(), Source(14, seconds=5.0)
    submit(b, 1, source)
    assert b.scheduler.plan() is None
    expires = source.open[0].expires
    b.scheduler.lapse(expires - 0.5)
    assert source.open
    b.scheduler.lapse(expires)
    assert source.cancelled


def test_a_request_with_loaded_kv_that_is_not_finite_computes_all_of_it(bench: Make) -> None:
    b, source = bench(), Source(14)
    submit(b, 1, source)
    assert b.scheduler.plan() is None
    b.scheduler.filled(source.open[0])
    b.step(finite=[False])
    assert b.events == {}
    plan = b.step()
    assert (plan.start.tolist(), plan.n_query.tolist()) == ([0], [20])
    b.drain()
    assert len(b.events[1]) == 4
