from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from llmcore.api.bridge import Abort, ChoiceEvent, Finish, FinishChoice, ModelFacts, Prompt, StepEvents, Submit
from llmcore.api.errors import RequestError
from llmcore.config import Config
from llmcore_server.http.bridge import WireBridge, merge
from llmcore_server.messages import (
    EngineGone,
    Heartbeat,
    Hello,
    Mailbox,
    Outlet,
    Shutdown,
    State,
    ToEngine,
    ToSupervisor,
    WorkerLaunch,
)
from served import PATIENCE

FACTS = ModelFacts(architecture="A", vocab_size=9, max_input_len=9, max_total_len=9, kv_tokens=9, max_running=9)


def events(*rows: tuple[int, int, list[int], Finish], stamp: float = 1.0, **more: object) -> StepEvents:
    return StepEvents(
        stamp=stamp,
        request=[row[0] for row in rows],
        choice=[row[1] for row in rows],
        count=[len(row[2]) for row in rows],
        tokens=[token for row in rows for token in row[2]],
        finish=[int(row[3]) for row in rows],
        **more,  # type: ignore[arg-type]
    )


RUNNING, STOP = Finish.RUNNING, Finish.STOP


class Engine:
    """The test plays the engines and the supervisor. Most methods are of the first engine."""

    def __init__(self, directory: Path, count: int = 1) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        engines = [f"ipc://{directory}/engine-{i}" for i in range(count)]
        control = f"ipc://{directory}/control"
        self.inboxes: list[Mailbox[ToEngine]] = [Mailbox(self.context, engine, ToEngine) for engine in engines]
        self.inbox = self.inboxes[0]
        self.control: Mailbox[ToSupervisor] = Mailbox(self.context, control, ToSupervisor)
        launch = WorkerLaunch(
            name="worker-4",
            parent=1,
            log="",
            control=control,
            engines=tuple(engines),
            config=Config(),
            worker=4,
            mailbox=f"ipc://{directory}/worker-4",
            listen_fd=0,
            tokenizer_dir="",
            facts=FACTS,
        )
        self.shutdowns: list[float] = []
        self.bridge = WireBridge(launch, on_shutdown=self.shutdowns.append)
        self.outlet = Outlet(self.context, launch.mailbox)
        self.hub = threading.Thread(target=self.bridge.run)
        self.heard: list[ToEngine] = []

    def next(self) -> object:
        """The next message that is no heartbeat."""
        while True:
            while self.heard:
                message = self.heard.pop(0)
                if not isinstance(message.body, Heartbeat):
                    assert message.sender == 4
                    return message.body
            assert self.inbox.wait(PATIENCE)
            self.heard += self.inbox.drain()


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(tmp_path, getattr(request, "param", 1))
    engine.hub.start()
    assert isinstance(engine.next(), Hello)
    yield engine
    engine.bridge.stop()
    engine.hub.join(PATIENCE)
    engine.outlet.close(0)
    for inbox in engine.inboxes:
        inbox.close()
    engine.control.close()
    engine.context.term()


def until(condition: Callable[[], object]) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE, "did not happen"
        time.sleep(0.002)


def submit(number: int, n: int = 1) -> Submit:
    return Submit(id=number, prompt=Prompt.of([1]), max_new_tokens=4, n=n)


def test_events_reach_their_own_request_until_it_ends(engine: Engine) -> None:
    one: list[ChoiceEvent] = []
    two: list[ChoiceEvent] = []
    engine.bridge.submit(submit(1), one.append)
    engine.bridge.submit(submit(2), two.append)
    assert engine.next() == submit(1)
    assert engine.next() == submit(2)
    engine.outlet.send(events((1, 0, [5], RUNNING), (2, 0, [6], RUNNING)))
    until(lambda: one and two)
    engine.outlet.send(events((1, 0, [7], STOP), (2, 0, [8], RUNNING)))
    engine.outlet.send(events((1, 0, [9], RUNNING), (2, 0, [10], STOP)))
    until(lambda: two[-1].finish is STOP)
    assert [event.tokens for event in one] == [(5,), (7,)]
    assert [token for event in two for token in event.tokens] == [6, 8, 10]
    assert len(engine.bridge._requests) == 0


def test_an_aborted_request_hears_nothing_more(engine: Engine) -> None:
    heard: list[ChoiceEvent] = []
    engine.bridge.submit(submit(1), heard.append)
    engine.bridge.abort(1)
    engine.bridge.abort(1)
    assert [engine.next(), engine.next()] == [submit(1), Abort(1)]
    done: list[ChoiceEvent] = []
    engine.bridge.submit(submit(2), done.append)
    engine.outlet.send(events((1, 0, [5], RUNNING), (2, 0, [6], STOP)))
    until(lambda: done)
    assert heard == []
    assert engine.next() == submit(2), "the second abort was not sent"


def test_a_finished_choice_hears_nothing_more_and_others_go_on(engine: Engine) -> None:
    heard: list[ChoiceEvent] = []
    engine.bridge.submit(submit(1, n=2), heard.append)
    engine.bridge.finish(1, 0, 3)
    assert [engine.next(), engine.next()] == [submit(1, n=2), FinishChoice(1, 0, 3)]
    engine.outlet.send(events((1, 0, [5], RUNNING), (1, 1, [6], STOP)))
    until(lambda: heard)
    assert [(event.choice, event.tokens) for event in heard] == [(1, (6,))]


def test_a_sink_that_raises_loses_only_its_own_request(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    bad: list[ChoiceEvent] = []
    good: list[ChoiceEvent] = []

    def raises(event: ChoiceEvent) -> None:
        bad.append(event)
        if event.error is None:
            raise ValueError("a bug")

    engine.bridge.submit(submit(1), raises)
    engine.bridge.submit(submit(2), good.append)
    engine.outlet.send(events((1, 0, [5], RUNNING), (2, 0, [6], STOP)))
    until(lambda: good)
    assert [engine.next() for _ in range(3)] == [submit(1), submit(2), Abort(1)]
    assert bad[-1].error is not None and bad[-1].error[0] == "internal_error"
    assert "a bug" in caplog.text


def test_a_dead_engine_ends_every_choice_and_refuses_new_requests(engine: Engine) -> None:
    heard: list[ChoiceEvent] = []
    engine.bridge.submit(submit(1, n=2), heard.append)
    engine.outlet.send(EngineGone("gone"))
    until(lambda: len(heard) == 2)
    assert [event.finish for event in heard] == [Finish.ERROR] * 2
    assert heard[0].error is not None and heard[0].error[0] == "engine_failed"
    with pytest.raises(RequestError) as refused:
        engine.bridge.submit(submit(2), heard.append)
    assert (refused.value.status, refused.value.code) == (503, "engine_failed")
    assert not engine.bridge.state.ready


def test_end_all_ends_what_is_open_and_frees_it(engine: Engine) -> None:
    heard: list[ChoiceEvent] = []
    engine.bridge.submit(submit(1), heard.append)
    engine.bridge.end_all()
    until(lambda: heard)
    assert heard[0].error is not None and heard[0].error[0] == "server_overloaded"
    assert [engine.next(), engine.next()] == [submit(1), Abort(1)]


def test_heartbeats_say_which_step_was_handled(engine: Engine) -> None:
    engine.outlet.send(events((1, 0, [5], RUNNING), stamp=42.5))
    while True:
        assert engine.inbox.wait(PATIENCE)
        if any(message.body == Heartbeat(42.5) for message in engine.inbox.drain()):
            break


def test_state_and_shutdown_arrive(engine: Engine) -> None:
    engine.outlet.send(State(ready=False, reason="why"))
    engine.outlet.send(Shutdown(2.5))
    until(lambda: engine.shutdowns)
    assert engine.bridge.state.reason == "why"
    assert engine.shutdowns == [2.5]


def test_rubbish_is_dropped_and_counted(engine: Engine) -> None:
    engine.outlet.send(["rubbish"])
    engine.outlet.send(State(ready=False))
    until(lambda: not engine.bridge.state.ready)
    assert engine.bridge.dropped == 1


def test_steps_that_queued_up_are_merged() -> None:
    first = events(
        (1, 0, [5, 6], RUNNING),
        (1, 1, [7], RUNNING),
        cached={0: 12},
        logprobs=[-1.0, -2.0, -3.0],
        top={0: [[(5, -1.0)], [(6, -2.0)]]},
    )
    second = events((1, 1, [], STOP), (2, 0, [9], RUNNING))
    third = events((1, 0, [8], STOP), logprobs=[-4.0], top={0: [[(8, -4.0)]]})
    merged = list(merge([first, second, third]))
    assert [(request, event.choice) for request, event in merged] == [(1, 0), (1, 1), (2, 0)]
    event = merged[0][1]
    assert (event.tokens, event.finish, event.cached) == ((5, 6, 8), STOP, 12)
    assert event.logprobs == (-1.0, -2.0, -4.0)
    assert event.top == (((5, -1.0),), ((6, -2.0),), ((8, -4.0),))
    assert (merged[1][1].tokens, merged[1][1].finish) == ((7,), STOP)


def test_what_comes_once_survives_a_merge() -> None:
    columns: dict[str, Any] = {"stamp": 1.0, "request": [1], "choice": [0], "count": [1], "tokens": [7]}
    first = StepEvents(
        **columns,
        finish=[0],
        prompt_logprobs={0: [-1.0, -2.0]},
        prompt_ranks={0: [1, 4]},
        cached={0: 3},
        unenforced={0: ["not"]},
    )
    second = StepEvents(**columns, finish=[STOP], scores={0: [0.5]})
    ((_, event),) = merge([first, second])
    assert (event.prompt_logprobs, event.prompt_ranks, event.scores) == ((-1.0, -2.0), (1, 4), (0.5,))
    assert (event.cached, event.unenforced) == (3, ("not",))
    # a field that a merge forgets would be lost only now and then
    known = {
        "choice",
        "tokens",
        "finish",
        "logprobs",
        "top",
        "cached",
        "error",
        "scores",
        "prompt_logprobs",
        "unenforced",
    }
    known |= {"prompt_ranks", "prompt_top", "pooled"}
    assert set(ChoiceEvent.__struct_fields__) == known


def test_merged_logprobs_stay_beside_their_tokens() -> None:
    first = events((1, 0, [5], RUNNING))
    second = events((1, 0, [6], RUNNING), logprobs=[-0.5])
    ((_, event),) = merge([first, second])
    assert len(event.logprobs) == len(event.tokens) == 2


@pytest.mark.parametrize("engine", [2], indirect=True)
def test_the_requests_of_a_worker_go_to_the_engines_in_turn(engine: Engine) -> None:
    def bodies(inbox: Mailbox[ToEngine]) -> list[object]:
        return [message.body for message in inbox.drain() if not isinstance(message.body, Hello | Heartbeat)]

    got: dict[int, object] = {}
    sink = got.__setitem__
    for number in (1, 2, 3, 4):
        engine.bridge.submit(submit(number), lambda event, number=number: sink(number, event))  # type: ignore[misc]
    engine.bridge.abort(3)
    engine.bridge.finish(2, 0, 1)
    seen: list[list[object]] = [[], []]
    until(
        lambda: [seen[i].extend(bodies(inbox)) for i, inbox in enumerate(engine.inboxes)] and sum(map(len, seen)) == 6
    )
    assert seen[1] == [submit(1), submit(3), Abort(3)]
    assert seen[0] == [submit(2), submit(4), FinishChoice(2, 0, 1)]
    engine.outlet.send(events((1, 0, [5], STOP), (4, 0, [6], STOP)))
    until(lambda: set(got) == {1, 4})
    engine.outlet.send(EngineGone("one has stopped"))
    until(lambda: engine.bridge.gate.closed)
    with pytest.raises(RequestError, match="engine has stopped"):
        engine.bridge.submit(submit(5), lambda event: None)
