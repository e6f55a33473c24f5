"""What a beam search is refused, and how its beams are held together; tests/core/engine compares its answers with
transformers'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llmcore.api import RequestError, SamplingParams, Submit
from llmcore.api.bridge import MOST_LOGPROBS_AT_ONCE, BeamSearch, Finish, Prompt
from llmcore.sched.beam_search import Beams, Continuation, candidates, check_search, considered, searching

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "penalty": ({"sampling": SamplingParams(presence_penalty=1.0)}, "presence_penalty", "own probabilities"),
    "temperature": ({"sampling": SamplingParams(temperature=0.5)}, "temperature", "own probabilities"),
    "log-probabilities": (
        {"sampling": SamplingParams(logprobs=20), "max_new_tokens": 4000, "n": 2},
        "logprobs",
        "might keep 168,000",
    ),
    "log-probabilities of tokens alone": (
        {"sampling": SamplingParams(logprobs=0), "max_new_tokens": MOST_LOGPROBS_AT_ONCE + 1, "n": 1},
        "logprobs",
        f"might keep {MOST_LOGPROBS_AT_ONCE + 1:,}",
    ),
    "length penalty": ({"beams": BeamSearch(2, float("nan"))}, "length_penalty", "from -5 to 5"),
    "endless length penalty": ({"beams": BeamSearch(2, float("-inf"))}, "length_penalty", "from -5 to 5"),
    "large length penalty": ({"beams": BeamSearch(2, 5.5)}, "length_penalty", "from -5 to 5"),
    "vocabulary": ({"beams": BeamSearch(60)}, "num_beams", "60 beams need more tokens"),
    "vocabulary without stop ids": (
        {"beams": BeamSearch(24), "stop_ids": (1, 2, 3), "min_new_tokens": 1},
        "num_beams",
        "24 beams need more tokens",
    ),
}


def search(**fields: Any) -> Submit:
    return Submit(**{"id": 1, "prompt": Prompt.of([0]), "max_new_tokens": 4, "beams": BeamSearch(2), **fields})


@pytest.mark.parametrize("name", WRONG)
def test_what_a_search_cannot_do_is_refused(name: str) -> None:
    fields, param, message = WRONG[name]
    with pytest.raises(RequestError, match=message) as error:
        check_search(search(**fields), 100)
    assert error.value.param == param


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_has_no_meaning_for_a_search_may_stand(temperature: float) -> None:
    check_search(search(sampling=SamplingParams(temperature=temperature, seed=5, logprobs=2)), 100)


def test_the_largest_search() -> None:
    check_search(search(beams=BeamSearch(50, 5.0)), 100)
    check_search(search(beams=BeamSearch(2, -5.0)), 100)
    most = MOST_LOGPROBS_AT_ONCE
    check_search(search(sampling=SamplingParams(logprobs=0), max_new_tokens=most), 100)
    check_search(search(sampling=SamplingParams(logprobs=1), max_new_tokens=most // 4), 100)
    check_search(search(max_new_tokens=9 * most), 100)


def test_a_search_needs_room_for_all_its_beams(bench: Any) -> None:
    b = bench(slots=40, max_running=8)
    with pytest.raises(RequestError, match="or the number of beams"):
        b.submit(1, range(10), max_new=20, beams=BeamSearch(4))
    with pytest.raises(RequestError, match="a search needs from 2 beams"):
        b.submit(1, range(10), max_new=2, beams=BeamSearch(9))


def test_an_abort_ends_all_beams(bench: Any) -> None:
    b = bench(ahead=1)
    b.submit(1, range(10), max_new=20, beams=BeamSearch(3))
    plan = b.plan()
    b.scheduler.abort(0, 1)
    b.commit(plan)
    assert b.scheduler.idle and b.group.pool.live == 0 and 1 not in b.events


@pytest.mark.parametrize(
    ("fields", "looked_at", "of_each_beam"),
    [
        ({}, 4, 4),
        ({"stop_ids": (9,)}, 4, 4),
        ({"stop_ids": (7, 8, 9)}, 8, 8),
        ({"stop_ids": (7, 8, 9), "min_new_tokens": 1}, 8, 11),
        ({"min_new_tokens": 1}, 4, 4),
        ({"sampling": SamplingParams(logprobs=20)}, 4, 20),
    ],
)
def test_as_many_candidates_are_computed_as_may_be_needed(
    fields: dict[str, Any], looked_at: int, of_each_beam: int
) -> None:
    submit = search(**fields)
    assert (considered(submit), candidates(submit)) == (looked_at, of_each_beam)
    computed = searching(submit)
    assert computed.sampling == SamplingParams(temperature=0.0, logprobs=of_each_beam)
    assert computed.min_new_tokens == 0 and computed.stop_ids == submit.stop_ids


# --- the search itself -----------------------------------------------------------------------------------------

Heard = tuple[list[int], list[float]]


def hear(beams: Beams, *heard: Heard) -> list[Continuation] | None:
    """Tell every beam's best next tokens, the last beam's first; returns how they go on."""
    complete = [
        beams.hear(beam, np.array(ids, np.int32), np.array(logprobs, np.float32))
        for beam, (ids, logprobs) in reversed([*enumerate(heard)])
    ]
    assert complete == [False] * (len(heard) - 1) + [True]
    return beams.choose()


def placed(children: list[Continuation] | None) -> list[tuple[int, list[int], float]]:
    """(parent, tokens, score) by place."""
    assert children is not None
    return [(one.parent, [at.token for at in one.path.tokens()], float(one.score)) for one in children]


def answered(beams: Beams) -> list[tuple[list[int], Finish, float]]:
    return [([at.token for at in one.path.tokens()], one.finish, float(one.score)) for one in beams.answers()]


FIRST: Heard = ([1, 2, 9, 3], [-1.0, -2.0, -2.5, -3.0])


def test_the_best_of_a_beam_stays_in_its_place_and_another_takes_a_free_one() -> None:
    beams = Beams(search(stop_ids=(9,)))
    assert placed(hear(beams, FIRST)) == [(0, [1], -1.0), (0, [2], -2.0)]
    # The first beam's best ends, and both that go on come from the second.
    second = hear(beams, ([9, 4, 5, 6], [-0.5, -8.0, -9.0, -9.5]), ([7, 8, 9, 3], [-0.25, -0.5, -4.0, -5.0]))
    assert placed(second) == [(1, [2, 8], -2.5), (1, [2, 7], -2.25)]
    assert answered(beams) == [([1, 9], Finish.STOP, -0.75)]


def test_answers_are_the_best_of_those_that_ended_by_their_length() -> None:
    beams = Beams(search(n=2, stop_ids=(9,), max_new_tokens=3, beams=BeamSearch(2, 1.0)))
    hear(beams, ([9, 1, 2, 3], [-0.75, -1.0, -2.0, -3.0]))
    hear(beams, ([9, 1, 2, 3], [-0.5, -1.0, -2.0, -3.0]), ([4, 5, 6, 7], [-0.25, -1.0, -5.0, -6.0]))
    assert hear(beams, ([1, 2, 3, 4], [-0.5, -1, -2, -3]), ([1, 2, 3, 4], [-0.25, -1, -2, -3])) is None
    assert answered(beams) == [([9], Finish.STOP, -0.75), ([1, 9], Finish.STOP, -0.75)]


def test_an_answer_that_is_cut_short_by_its_length_counts_too() -> None:
    beams = Beams(search(n=2, max_new_tokens=2, beams=BeamSearch(2, 1.0)))
    hear(beams, FIRST)
    assert hear(beams, ([5, 6, 7, 8], [-1, -2, -3, -4]), ([5, 6, 7, 8], [-0.5, -4, -5, -6])) is None
    assert answered(beams) == [([1, 5], Finish.LENGTH, -1.0), ([2, 5], Finish.LENGTH, -1.25)]


def test_stop_ids_are_no_continuation_of_a_short_answer() -> None:
    beams = Beams(search(stop_ids=(9,), min_new_tokens=2))
    assert placed(hear(beams, ([9, 1, 2, 3, 4], [-0.1, -1.0, -2.0, -3.0, -4.0]))) == [(0, [1], -1.0), (0, [2], -2.0)]
    hear(beams, ([9, 1, 2, 3, 4], [-0.1, -1, -2, -3, -4]), ([9, 5, 6, 7, 8], [-0.1, -1.5, -2, -3, -4]))
    last = hear(beams, ([9, 1, 2, 3, 4], [-0.5, -1, -2, -3, -4]), ([9, 5, 6, 7, 8], [-0.5, -1, -2, -3, -4]))
    assert placed(last) == [(0, [1, 1, 1], -3.0), (0, [1, 1, 2], -4.0)]
    assert answered(beams) == [([1, 1, 9], Finish.STOP, pytest.approx(-2.5 / 3))]


def test_log_probabilities_of_every_place_go_with_a_path() -> None:
    beams = Beams(search(sampling=SamplingParams(logprobs=2), max_new_tokens=1))
    assert hear(beams, FIRST) is None
    (answer,) = beams.answers()
    (at,) = answer.path.tokens()
    assert (at.token, at.logprob, at.top, at.length) == (1, -1.0, ((1, -1.0), (2, -2.0)), 1)


@pytest.mark.parametrize(
    ("early", "penalty", "most", "over"),
    [
        (True, 1.0, 10, True),
        (False, 1.0, 10, True),
        (None, 1.0, 10, False),
        (None, 1.0, 2, False),
        (None, 0.0, 10, True),
        (False, 0.0, 10, True),
    ],
)
def test_when_a_search_is_over(early: bool | None, penalty: float, most: int, over: bool) -> None:
    """Two answers ended with -0.5 and -1, and the best beam has -1.5: it would be better in two tokens' time. The
    other one, with -2.5, would be in three."""
    beams = Beams(search(stop_ids=(9, 8), max_new_tokens=most, beams=BeamSearch(2, penalty, early)))
    children = hear(beams, ([9, 8, 1, 2, 3, 4], [-0.5, -1.0, -1.5, -2.5, -3.0, -4.0]))
    assert (children is None) == over
    assert answered(beams) == [([9], Finish.STOP, -0.5)]
    assert beams.answers()[0].path.top == (), "no log-probabilities were asked for"


def test_a_beam_that_is_as_good_as_the_worst_answer_does_not_go_on() -> None:
    beams = Beams(search(stop_ids=(9, 8)))
    assert hear(beams, ([9, 8, 1, 2, 3, 4], [-0.5, -1.0, -1.0, -2.0, -3.0, -4.0])) is None


def best_of_four(b: Any) -> Any:
    """A step of a search in which every beam hears the same four tokens, and goes on best with the first."""
    plan = b.plan()
    ids = np.tile(np.arange(4, dtype=np.int32), (plan.sample_row.size, 1))
    best = np.tile(np.float32([-0.125, -2, -3, -4]), (plan.sample_row.size, 1))
    best[1:, 0] = -0.0625
    b.commit(plan, logprobs=best[:, 0], top_ids=ids, top_logprobs=best)
    return plan


def test_a_beam_that_stays_in_its_place_sends_no_table_rows(bench: Any) -> None:
    b = bench()
    b.submit(1, range(10), max_new=4, n=2, beams=BeamSearch(2))
    assert [best_of_four(b).writes[0].index.size for _ in range(4)] == [10, 1 + 11, 2, 2]
    assert [event.logprobs for event in b.events[1]] == [(), ()]
    assert b.scheduler.totals.output_tokens == 8


def test_a_search_that_starts_again_knows_nothing() -> None:
    beams = Beams(search(stop_ids=(9,)))
    hear(beams, ([9, 1, 2, 3], [-0.5, -1.0, -2.0, -3.0]))
    beams.hear(1, np.array([5], np.int32), np.array([-1.0], np.float32))
    beams.restart()
    assert placed(hear(beams, FIRST)) == [(0, [1], -1.0), (0, [2], -2.0)]
    assert beams.answers() == []


def test_log_probabilities_come_to_the_searches_that_asked_for_them(bench: Any) -> None:
    b = bench()
    for number, logprobs in enumerate([None, 1, None]):
        sampling = SamplingParams(logprobs=logprobs)
        b.submit(number, range(10 * number, 10 * number + 5), max_new=1, sampling=sampling, beams=BeamSearch(2))
    best_of_four(b)
    assert [b.events[number][0].logprobs for number in range(3)] == [(0.0,), (-0.0625,), (0.0,)]
    assert [b.events[number][0].top for number in range(3)] == [(), (((0, -0.0625),),), ()]


def test_all_beams_end_with_their_search_and_others_are_told_too(bench: Any) -> None:
    b = bench()
    b.submit(1, range(10), max_new=4, n=2, beams=BeamSearch(2))
    best_of_four(b)
    b.submit(2, [50])
    b.receive(b.scheduler.abandon(("engine_failed", "the device is gone")))
    assert [(event.choice, event.finish) for event in b.events[1]] == [(0, Finish.ERROR), (1, Finish.ERROR)]
    assert [event.finish for event in b.events[2]] == [Finish.ERROR]
