"""What a beam search is refused, and how its beams are held together; tests/core/engine compares its answers with
transformers'."""

from __future__ import annotations

from typing import Any

import pytest
from llmcore.api import RequestError, SamplingParams, Submit
from llmcore.api.bridge import BeamSearch, Prompt
from llmcore.sched.beam_search import check_search

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "penalty": ({"sampling": SamplingParams(presence_penalty=1.0)}, "presence_penalty", "own probabilities"),
    "temperature": ({"sampling": SamplingParams(temperature=0.5)}, "temperature", "own probabilities"),
    "log-probabilities": (
        {"sampling": SamplingParams(logprobs=20), "max_new_tokens": 4000, "n": 2},
        "logprobs",
        "might keep 168,000",
    ),
    "length penalty": ({"beams": BeamSearch(2, float("nan"))}, "length_penalty", "from -5 to 5"),
    "vocabulary": ({"beams": BeamSearch(60)}, "num_beams", "60 beams need more tokens"),
}


def search(**fields: Any) -> Submit:
    return Submit(**{"id": 1, "prompt": Prompt.of([0]), "max_new_tokens": 4, "beams": BeamSearch(2), **fields})


@pytest.mark.parametrize("name", WRONG)
def test_what_a_search_cannot_do_is_refused(name: str) -> None:
    fields, param, message = WRONG[name]
    with pytest.raises(RequestError, match=message) as error:
        check_search(search(**fields), 100)
    assert error.value.param == param


def test_what_has_no_meaning_for_a_search_may_stand() -> None:
    check_search(search(sampling=SamplingParams(temperature=1.0, seed=5, logprobs=2)), 100)


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
