"""The bridge: rows of a step become events, events reach their requests, plain values become structs."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from llmcore.api.bridge import ChoiceEvent, Finish, StepEvents, Submit, Subscribers, convert, explode
from llmcore.api.errors import RequestError

COLUMNS: dict[str, list[int]] = {
    "request": [7, 7, 9],
    "choice": [0, 1, 0],
    "count": [1, 0, 2],
    "tokens": [5, 6, 8],
    "finish": [Finish.RUNNING, Finish.STOP, Finish.LENGTH],
}


def test_rows_of_tokens_become_events() -> None:
    events = list(explode(StepEvents(stamp=0.0, cached={2: 4}, **COLUMNS)))
    assert events == [
        (7, ChoiceEvent(choice=0, tokens=(5,), finish=Finish.RUNNING)),
        (7, ChoiceEvent(choice=1, tokens=(), finish=Finish.STOP)),
        (9, ChoiceEvent(choice=0, tokens=(6, 8), finish=Finish.LENGTH, cached=4)),
    ]


def test_rare_columns_go_to_their_rows() -> None:
    columns = StepEvents(
        stamp=0.0,
        logprobs=[-1.0, -2.0, -3.0],
        top={2: [[(6, -2.0)], [(8, -3.0), (1, -4.0)]]},
        error={1: ("code", "message")},
        scores={0: [0.5]},
        **COLUMNS,
    )
    first, second, third = (event for _, event in explode(columns))
    assert (first.logprobs, first.scores, first.error) == ((-1.0,), (0.5,), None)
    assert (second.logprobs, second.error) == ((), ("code", "message"))
    assert third.logprobs == (-2.0, -3.0) and third.top == (((6, -2.0),), ((8, -3.0), (1, -4.0)))


def submit(number: int, n: int = 1) -> Submit:
    return Submit(id=number, prompt=b"\1\0\0\0", max_new_tokens=4, n=n)


def event(choice: int, finish: Finish = Finish.RUNNING) -> ChoiceEvent:
    return ChoiceEvent(choice=choice, tokens=(7,), finish=finish)


def test_a_request_listens_until_its_last_choice_ends() -> None:
    requests = Subscribers(lambda request: None)
    heard: list[ChoiceEvent] = []
    requests.open(submit(1, n=2), heard.append)
    for choice, finish in ((0, Finish.STOP), (0, Finish.RUNNING), (1, Finish.RUNNING), (1, Finish.STOP), (1, 0)):
        requests.deliver(1, event(choice, Finish(finish)))
    assert [(e.choice, e.finish) for e in heard] == [(0, Finish.STOP), (1, Finish.RUNNING), (1, Finish.STOP)]
    assert len(requests) == 0 and not requests.close(1)


def test_a_sink_that_raises_is_told_once_and_nobody_else_suffers() -> None:
    aborted: list[int] = []
    requests = Subscribers(aborted.append)
    heard: list[ChoiceEvent] = []

    def sink(event: ChoiceEvent) -> None:
        heard.append(event)
        raise ValueError

    requests.open(submit(1, n=2), sink)
    requests.deliver(1, event(0))
    requests.deliver(1, event(1))
    assert [e.error and e.error[0] for e in heard] == [None, "internal_error"]
    assert aborted == [1]


def test_after_a_refusal_everything_ends_and_nothing_opens() -> None:
    aborted: list[int] = []
    requests = Subscribers(aborted.append)
    heard: list[ChoiceEvent] = []
    requests.open(submit(1, n=2), heard.append)
    requests.refuse(("engine_failed", "gone"))
    requests.refuse(("server_overloaded", "later"))
    with pytest.raises(RequestError, match="gone") as refused:
        requests.open(submit(2), heard.append)
    assert (refused.value.code, refused.value.status) == ("engine_failed", 503)
    requests.end_all()
    requests.end_all()
    assert [(e.choice, e.error) for e in heard] == [(0, ("engine_failed", "gone")), (1, ("engine_failed", "gone"))]
    assert aborted == [1] and len(requests) == 0


# --- plain values -------------------------------------------------------------------------------------------------

CROWD = """
import sys, threading
import msgspec
from llmcore.api.bridge import convert

sys.setswitchinterval(1e-6)

def ask(gate, kind):
    gate.wait()
    assert convert({"inner": {"deep": {"x": 1}}}, kind).inner.deep.x == 1

for i in range(60):
    names = [(f"f{j}", dict[str, list[int]] | None, None) for j in range(20)]
    deep = msgspec.defstruct(f"Deep{i}", [("x", int), *names])
    inner = msgspec.defstruct(f"Inner{i}", [("deep", deep), *names])
    kind = msgspec.defstruct(f"Outer{i}", [("inner", inner), *names])
    gate = threading.Barrier(8)
    crowd = [threading.Thread(target=ask, args=(gate, kind)) for _ in range(8)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
"""


def test_a_crowd_may_bring_the_first_values_of_a_type() -> None:
    done = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_does_not_fit_is_an_error_every_time() -> None:
    for _ in range(2):
        with pytest.raises(msgspec.ValidationError):
            convert({"x": "1"}, msgspec.defstruct("Point", [("x", int)]))
