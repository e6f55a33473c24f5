"""How many may wait in the engine: exact bounds, what is free beside them, keys, and what workers hear of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from llmcore.api.bridge import BeamSearch, ModelFacts, Prompt, Submit
from llmcore.api.errors import RequestError
from llmcore.config import Config
from llmcore.registry.loader import configure
from llmcore.sched.scheduler import QueueStats
from llmcore_server.engine import admission
from llmcore_server.engine.admission import RETRY_SECONDS, Admission
from llmcore_server.limits import NO_BOUND, UNBOUNDED, Bounds, bounds
from llmcore_server.messages import Intake

LIMITS = Bounds(waiting=4, tokens=100, per_key=3, open=12)


def facts(max_running: int, kv_tokens: int) -> ModelFacts:
    return ModelFacts(
        architecture="A",
        vocab_size=9,
        max_input_len=9,
        max_total_len=9,
        kv_tokens=kv_tokens,
        max_running=max_running,
    )


def submit(tokens: int = 1, *, n: int = 1, client: int = -1, beams: int = 0) -> Submit:
    search = BeamSearch(beams) if beams else None
    return Submit(id=1, prompt=Prompt.of([0] * tokens), max_new_tokens=1, n=n, client=client, beams=search)


class Desk:
    """An Admission, the queue that the test says there is, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limits: Bounds = LIMITS) -> None:
        self.now = 1000.0
        self.queue_stats = QueueStats(0, 0, places=8, slots=1000)
        monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.admission = Admission(limits, lambda: self.queue_stats)

    def left_over(self, choices: int, tokens: int, *, places: int = 0, slots: int = 0) -> None:
        """After a step so many wait."""
        self.queue_stats = QueueStats(choices, tokens, places, slots)
        self.admission.stepped()

    def refusal(self, request: Submit) -> RequestError | None:
        try:
            self.admission.check(request)
        except RequestError as error:
            return error
        return None


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_as_many_wait_as_may_and_not_one_more(desk: Desk) -> None:
    desk.left_over(3, 3)
    assert desk.refusal(submit()) is None
    desk.left_over(4, 4)
    error = desk.refusal(submit())
    assert error is not None and (error.status, error.code) == (429, "queue_full")


def test_tokens_are_bounded_too(desk: Desk) -> None:
    desk.left_over(1, 90)
    assert desk.refusal(submit(10)) is None
    assert desk.refusal(submit(11)) is not None


def test_every_answer_and_every_beam_counts(desk: Desk) -> None:
    desk.left_over(2, 2)
    assert desk.refusal(submit(n=2)) is None
    assert desk.refusal(submit(n=3)) is not None
    assert desk.refusal(submit(beams=3)) is not None


def test_an_empty_queue_takes_any_request(desk: Desk) -> None:
    desk.left_over(0, 0)
    assert desk.refusal(submit(500, n=8)) is None


def test_what_is_free_counts_while_nobody_was_left_over(desk: Desk) -> None:
    """A burst that an idle server has places for is taken at once, however short its queue may be."""
    desk.left_over(0, 0)
    desk.queue_stats = QueueStats(11, 11, places=8, slots=1000)
    assert desk.refusal(submit()) is None
    desk.queue_stats = QueueStats(12, 12, places=8, slots=1000)
    assert desk.refusal(submit()) is not None
    desk.left_over(4, 4, places=8, slots=1000)  # these found no KV: the places are of no use to them
    assert desk.refusal(submit()) is not None


def test_a_key_has_its_share_and_gets_it_back(desk: Desk) -> None:
    first = submit(n=2, client=0)
    desk.admission.began(first)
    assert desk.refusal(submit(client=0)) is None
    error = desk.refusal(submit(n=2, client=0))
    assert error is not None and (error.status, error.code) == (429, "rate_limit_exceeded")
    assert desk.refusal(submit(n=2, client=1)) is None
    desk.admission.ended(first)
    assert desk.refusal(submit(n=2, client=0)) is None


def test_retry_after_follows_how_fast_requests_end(desk: Desk) -> None:
    desk.left_over(4, 4)
    desk.now += 10
    for _ in range(9):
        desk.admission.ended(submit())
    error = desk.refusal(submit())
    assert error is not None and error.retry_after == 4  # ten in ten seconds, counting the one that is due


@pytest.mark.parametrize(("seconds", "ends", "expected"), [(0.001, 50, 1), (29.0, 0, RETRY_SECONDS)])
def test_retry_after_is_bounded(desk: Desk, seconds: float, ends: int, expected: int) -> None:
    desk.left_over(4, 4)
    desk.now += seconds
    for _ in range(ends):
        desk.admission.ended(submit())
    error = desk.refusal(submit())
    assert error is not None and error.retry_after == expected


def test_workers_hear_of_a_full_queue_once_and_of_room_again(desk: Desk) -> None:
    desk.left_over(4, 4)
    assert desk.admission.news() == Intake(full=True, retry_after=1)
    assert desk.admission.news() is None
    desk.left_over(3, 3)
    assert desk.admission.news() == Intake(full=False, retry_after=1)
    assert desk.admission.told == Intake(full=False, retry_after=1)


def test_a_long_queue_is_full_until_some_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, Bounds(waiting=100, tokens=10_000, per_key=NO_BOUND, open=200))
    full = []
    for waiting in (99, 100, 99, 96, 95, 96):
        desk.left_over(waiting, waiting)
        desk.admission.news()
        full.append(desk.admission.told.full)
    assert full == [False, True, True, True, False, False]


def test_nothing_is_refused_without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, UNBOUNDED)
    desk.left_over(10**6, 10**9)
    desk.admission.began(submit(client=0))
    assert desk.refusal(submit(client=0)) is None
    assert desk.admission.news() is None


def configured(**values: Any) -> Config:
    return configure(**values)[0]


def test_defaults_follow_what_runs_and_what_fits() -> None:
    found = bounds(Config(), facts(100, 5000))
    assert found == Bounds(waiting=100, tokens=20_000, per_key=NO_BOUND, open=200)
    two = bounds(configured(api_keys=["a", "b"]), facts(100, 5000))
    assert two.per_key == 100


def test_options_say_otherwise_and_0_means_any_number() -> None:
    config = configured(max_waiting_requests=7, max_waiting_tokens="1k", max_requests_per_key=2)
    assert bounds(config, facts(3, 9)) == Bounds(waiting=7, tokens=1000, per_key=2, open=10)
    config = configured(max_waiting_requests=0, max_waiting_tokens=0, max_requests_per_key=0, api_keys=["a", "b"])
    found = bounds(config, facts(3, 9))
    assert (found.waiting, found.tokens, found.per_key) == (NO_BOUND, NO_BOUND, NO_BOUND)
