from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from llmcore.api.balancing import Arrival, Candidate
from llmcore.api.bridge import (
    Abort,
    BeamSearch,
    ChoiceEvent,
    Finish,
    FinishChoice,
    Load,
    ModelFacts,
    Prompt,
    StepEvents,
    Submit,
)
from llmcore.api.errors import RequestError
from llmcore.builtin.balancers import Cost
from llmcore.config import Config
from llmcore.fleet.hits import CHUNK, chunks_of
from llmcore_server.http.bridge import FleetBridge, merge
from llmcore_server.messages import (
    EngineBack,
    EngineGone,
    EngineLoad,
    Heartbeat,
    Hello,
    Intake,
    Mailbox,
    Outlet,
    Routed,
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
            config=Config(plugin_options={"httpserver_workers": count}),
            worker=4,
            mailbox=f"ipc://{directory}/worker-4",
            listen_fd=0,
            tokenizer_dir="",
            facts_fd=-1,
        )
        self.shutdowns: list[float] = []
        self.bridge = FleetBridge(launch, FACTS, on_shutdown=self.shutdowns.append, balancer=Cost(Random(0)))
        self.supervisor = Outlet(self.context, launch.mailbox)
        self.outlets: list[Outlet] = []
        for inbox in self.inboxes:
            self.connect(inbox)
        self.outlet = self.outlets[0]
        self.hub = threading.Thread(target=self.bridge.run)
        self.heard: list[ToEngine] = []

    def connect(self, inbox: Mailbox[ToEngine]) -> Outlet:
        """An outlet to the mailbox of which the worker has told the engine with this inbox."""
        assert inbox.wait(PATIENCE)
        (hello,) = [message.body for message in inbox.drain() if isinstance(message.body, Hello)]
        self.outlets.append(Outlet(self.context, hello.mailbox))
        return self.outlets[-1]

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
    yield engine
    engine.bridge.stop()
    engine.hub.join(PATIENCE)
    for outlet in (engine.supervisor, *engine.outlets):
        outlet.close(0)
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
    engine.supervisor.send(EngineGone(0, "gone"))
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
    engine.supervisor.send(State(ready=False, reason="why"))
    engine.supervisor.send(Shutdown(2.5))
    until(lambda: engine.shutdowns)
    assert engine.bridge.state.reason == "why"
    assert engine.shutdowns == [2.5]


def test_rubbish_is_dropped_and_counted(engine: Engine) -> None:
    for outlet in (engine.supervisor, engine.outlet):
        outlet.send(["rubbish"])
    until(lambda: engine.bridge.dropped == 2)
    engine.supervisor.send(State(ready=False))
    until(lambda: not engine.bridge.state.ready)


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


LONG = list(range(9)) * 40


class Two:
    """Two engines of one worker, and what the sinks of its requests have heard."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bridge = engine.bridge
        self.heard: dict[int, list[ChoiceEvent]] = {}
        self.got: list[list[object]] = [[], []]

    def submit(self, number: int, prompt: list[int] | None = None, **more: Any) -> Submit:
        events = self.heard[number] = []
        given = Submit(id=number, prompt=Prompt.of(prompt or [number]), **{"max_new_tokens": 9, **more})
        self.bridge.submit(given, events.append)
        return given

    def bodies(self, index: int, count: int) -> list[object]:
        """The messages that an engine has got, once there are `count`."""

        def look() -> bool:
            got = [message.body for message in self.engine.inboxes[index].drain()]
            self.got[index] += [body for body in got if not isinstance(body, Hello | Heartbeat)]
            return len(self.got[index]) >= count

        until(look)
        return self.got[index]

    def place(self, number: int) -> int:
        """The engine at which a request is."""
        return self.bridge._fleet.sent[number].link.engine

    def tokens(self, number: int) -> list[int]:
        return [token for event in self.heard[number] for token in event.tokens]

    def die(self, index: int) -> None:
        self.engine.supervisor.send(EngineGone(index, "gone"))
        until(lambda: self.bridge._fleet.link(index) is None)


@pytest.fixture
def two(engine: Engine) -> Two:
    return Two(engine)


several = pytest.mark.parametrize("engine", [2], indirect=True)


@several
def test_a_request_goes_where_its_prefix_is_and_others_where_least_waits(two: Two) -> None:
    two.submit(1, LONG)
    first = two.place(1)
    two.submit(2, LONG[::-1])
    assert two.place(2) == 1 - first, "the own dispatch counts before the engine has told of it"
    two.engine.outlets[first].send(events((1, 0, [5], STOP)))
    two.engine.outlets[1 - first].send(events((2, 0, [5], STOP)))
    until(lambda: two.heard[1] and two.heard[2])
    for number in (3, 4, 5):
        two.submit(number, [*LONG, number])
        two.submit(number + 10, [*LONG[::-1], number])
        assert (two.place(number), two.place(number + 10)) == (first, 1 - first)
    two.submit(20, [*LONG, 1], salt=b"x")
    two.submit(21, [*LONG, 1], client=3)
    assert two.place(20) != two.place(21), "neither finds the other's prefix"


def routed(engine: Engine) -> list[Routed]:
    """The requests of which the supervisor has been told."""
    return [message.body for message in engine.control.drain() if isinstance(message.body, Routed)]


@several
def test_workers_tell_each_other_what_they_send(two: Two) -> None:
    chunks = chunks_of(np.array(LONG, np.int32))
    two.engine.supervisor.send(Routed(1, 40, chunks[:2]))
    until(lambda: two.bridge._fleet.links()[1].others == (1, 40, 40))
    two.submit(1, LONG)
    assert two.place(1) == 1, "its prefix is there, though more waits"
    two.engine.supervisor.send(Routed(1, 5000, []))
    until(lambda: two.bridge._fleet.links()[1].others == (2, 5040, 5040))
    two.submit(2, LONG, prompt_logprobs=True)
    assert two.place(2) == 0
    told: list[Routed] = []
    until(lambda: told.extend(routed(two.engine)) or len(told) == 2)
    assert told == [Routed(1, len(LONG) - 2 * CHUNK, chunks), Routed(0, len(LONG), [])]
    two.die(1)
    two.engine.supervisor.send(Routed(1, 5, chunks))
    until(lambda: two.place(1) == 0)
    until(lambda: told.extend(routed(two.engine)) or len(told) == 3)
    assert told[2] == Routed(0, len(LONG), chunks), "what goes to a dead engine does not count"


def test_one_engine_needs_no_such_word(engine: Engine) -> None:
    engine.bridge.submit(submit(1), [].append)
    assert engine.next() == submit(1)
    until(lambda: any(message.sender == "worker-4" for message in engine.control.drain()))
    assert not routed(engine)


@several
def test_what_an_engine_tells_and_its_full_queue_count(two: Two) -> None:
    two.engine.supervisor.send(EngineLoad(0, Load(waiting=2, waiting_tokens=5000)))
    until(lambda: two.bridge._fleet.links()[0].others == (2, 5000, 0))
    for number in (1, 2, 3):
        two.submit(number, LONG)
        assert two.place(number) == 1
    two.engine.outlets[1].send(Intake(full=True, retry_after=7))
    until(lambda: two.bridge._fleet.links()[1].intake.full)
    assert two.bridge.gate.check(-1) is None, "the other one has room"
    two.submit(4, LONG)
    assert two.place(4) == 0
    two.engine.outlets[0].send(Intake(full=True, retry_after=9))
    until(lambda: two.bridge.gate.check(-1) is not None)
    assert two.bridge.gate.retry_after == 7


@several
def test_a_dead_engine_s_request_goes_on_where_it_was(two: Two) -> None:
    given = two.submit(1, prompt_logprobs=True)
    dead = two.place(1)
    two.engine.outlets[dead].send(events((1, 0, [5], RUNNING), cached={0: 3}, unenforced={0: ["x"]}))
    two.engine.outlets[dead].send(events((1, 0, [6], RUNNING)))
    until(lambda: two.tokens(1) == [5, 6])
    two.die(dead)
    (onward,) = two.bodies(1 - dead, 1)
    assert onward == msgspec.structs.replace(given, produced={0: (5, 6)}, prompt_logprobs=False)
    other = two.engine.outlets[1 - dead]
    other.send(events((1, 0, [], RUNNING), unenforced={0: ["x"]}))
    other.send(events((1, 0, [7], RUNNING), cached={0: 1}))
    until(lambda: two.tokens(1) == [5, 6, 7])
    assert [event.cached for event in two.heard[1] if event.cached >= 0] == [3]
    assert [event.unenforced for event in two.heard[1] if event.unenforced] == [("x",)]
    two.bridge.abort(1)
    assert two.bodies(1 - dead, 2)[1] == Abort(1)


@several
def test_every_choice_that_has_not_ended_goes_on_where_it_was(two: Two) -> None:
    given = two.submit(1, n=4, prompt_logprobs=True)
    dead = two.place(1)
    first = two.engine.outlets[dead]
    first.send(events((1, 1, [5], RUNNING), (1, 2, [6], RUNNING), (1, 3, [7], STOP), cached={0: 3, 1: 3, 2: 3}))
    first.send(events((1, 1, [8], RUNNING)))
    until(lambda: sorted(two.tokens(1)) == [5, 6, 7, 8])
    two.bridge.finish(1, 2, 1)
    assert two.bodies(dead, 2) == [given, FinishChoice(1, 2, 1)]
    two.die(dead)
    (onward,) = two.bodies(1 - dead, 1)
    assert onward == msgspec.structs.replace(given, produced={0: (), 1: (5, 8)}), "choice 0 brings the prompt's report"
    other = two.engine.outlets[1 - dead]
    other.send(events((1, 0, [9], RUNNING), (1, 1, [10], STOP), cached={0: 1}))
    until(lambda: len(two.tokens(1)) == 6)
    assert [event.cached for event in two.heard[1] if event.cached >= 0] == [3], "of the first engine"
    two.engine.supervisor.send(EngineBack(dead))
    two.engine.connect(two.engine.inboxes[dead])
    two.got[dead].clear()
    two.die(1 - dead)
    (again,) = two.bodies(dead, 1)
    assert again == msgspec.structs.replace(given, produced={0: (9,)}, prompt_logprobs=False)
    two.engine.outlets[-1].send(events((1, 0, [11], STOP)))
    until(lambda: two.heard[1][-1].finish is STOP and two.tokens(1)[-1] == 11)
    assert not two.bridge._fleet.sent


@several
def test_what_ends_in_the_moment_of_a_move_ends(two: Two) -> None:
    """The worker has found the requests of a dead engine, and clients leave before they move."""
    fleet = two.bridge._fleet
    two.engine.supervisor.send(EngineLoad(1, Load(waiting=2, waiting_tokens=5000)))
    until(lambda: fleet.links()[1].others[1] == 5000)
    for number in (1, 2):
        two.submit(number, n=2)
    left = [fleet.sent[number] for number in (1, 2)]
    assert [sent.link.engine for sent in left] == [0, 0]
    two.bridge.abort(1)
    two.bridge.finish(2, 1, 0)
    assert [fleet.move(sent) for sent in left] == [False, True]
    (onward,) = two.bodies(1, 1)
    assert isinstance(onward, Submit) and (onward.id, onward.produced) == (2, {0: ()})
    assert set(fleet.sent) == {2} and fleet.links()[0].requests == 0


@several
def test_what_has_told_nothing_begins_again(two: Two) -> None:
    two.engine.supervisor.send(EngineLoad(1, Load(waiting=2, waiting_tokens=5000)))
    until(lambda: two.bridge._fleet.links()[1].others == (2, 5000, 0))
    given = [two.submit(number, LONG, **more) for number, more in enumerate(({"n": 2}, {"beams": BeamSearch(2)}), 1)]
    assert [two.place(number) for number in (1, 2)] == [0, 0]
    two.engine.outlets[0].send(events((2, 0, [], RUNNING), unenforced={0: ["x"]}))
    until(lambda: two.heard[2])
    two.die(0)
    assert two.bodies(1, 2) == given
    two.engine.outlets[1].send(events((2, 0, [], RUNNING), unenforced={0: ["x"]}))
    two.engine.outlets[1].send(events((2, 0, [5, 6], STOP), cached={0: 2}))
    until(lambda: two.tokens(2) == [5, 6])
    assert [(event.unenforced, event.cached) for event in two.heard[2]] == [(("x",), -1), ((), 2)]


@several
def test_a_failing_engine_s_requests_move_before_its_end(two: Two) -> None:
    two.submit(1)
    dead = two.place(1)
    two.engine.outlets[dead].send(events((1, 0, [5], RUNNING)))
    until(lambda: two.tokens(1) == [5])
    two.engine.outlets[dead].send(events((1, 0, [], Finish.ERROR), error={0: ("engine_failed", "the device")}))
    (onward,) = two.bodies(1 - dead, 1)
    assert isinstance(onward, Submit) and onward.produced == {0: (5,)}
    two.engine.outlets[dead].send(events((1, 0, [8], STOP)))
    for number in (2, 3):
        two.submit(number, [number] * 200)
        assert two.place(number) == 1 - dead, "it gets nothing more"
    two.engine.outlets[1 - dead].send(events((1, 0, [6], STOP)))
    until(lambda: two.tokens(1) == [5, 6])


@several
def test_tokens_that_come_together_with_the_error_are_computed_again(two: Two) -> None:
    two.submit(1)
    dead = two.place(1)
    two.engine.outlets[dead].send(events((1, 0, [5], Finish.ERROR), error={0: ("engine_failed", "the device")}))
    (onward,) = two.bodies(1 - dead, 1)
    assert isinstance(onward, Submit) and onward.produced == {}, "the client has not got it"
    two.engine.outlets[1 - dead].send(events((1, 0, [6], STOP)))
    until(lambda: two.heard[1])
    assert two.tokens(1) == [6]


@several
def test_an_engine_that_is_back_gets_requests_and_the_last_one_takes_all_with_it(two: Two) -> None:
    old = two.bridge._fleet.links()[1].mailbox.endpoint
    two.die(1)
    two.submit(1)
    assert two.place(1) == 0
    two.engine.supervisor.send(EngineBack(1))
    two.engine.connect(two.engine.inboxes[1])
    assert two.bridge._fleet.links()[1].mailbox.endpoint != old, "words of the dead one do not come to the new one"
    two.submit(2, LONG)
    assert two.place(2) == 1
    two.die(1)
    until(lambda: two.place(2) == 0)
    two.engine.supervisor.send(EngineGone(0, "gone"))
    until(lambda: two.heard[1] and two.heard[2])
    assert two.heard[1][0].error is not None and two.bridge.gate.closed
    with pytest.raises(RequestError, match="engine has stopped"):
        two.submit(3)


class Broken:
    def choose(self, arrival: Arrival, candidates: Sequence[Candidate]) -> int:
        raise ValueError("a bug")


@several
def test_a_balancer_that_fails_costs_no_request(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    two.bridge._fleet._balancer = Broken()
    two.submit(1)
    assert two.place(1) == 0 and "a bug" in caplog.text
