"""Subscribers: who hears what, and who is told that it is over."""

from __future__ import annotations

import pytest
from llmcore.api.bridge import ChoiceEvent, Finish, Submit
from llmcore.api.errors import RequestError
from llmcore.api.subscribers import Subscribers


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
