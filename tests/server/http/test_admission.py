"""Whom a worker lets through, in what shape it refuses the others, and how the limits of time are kept."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

import falcon
import falcon.testing
import pytest
from llmcore.api.bridge import Prompt, Submit
from llmcore.api.errors import RequestError
from llmcore.config import Config
from llmcore.text.stream import TextRules
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools.dialect import FakeBridge, FakeFront, FakeTransport, fake_front
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server.http import deadlines as module
from llmcore_server.http.access import Door
from llmcore_server.http.admission import Doorman, Gate
from llmcore_server.http.app import build_app
from llmcore_server.http.deadlines import NO_KEY, Deadlines, Terms
from llmcore_server.http.front import Route
from llmcore_server.http.generation import Generation, Request
from llmcore_server.http.reply import Reply
from llmcore_server.limits import NO_BOUND, Bounds
from llmcore_server.messages import Intake
from llmcore_server.settings import Access, Admission

LIMITS = Bounds(waiting=4, tokens=100, per_key=3, open=6)
FULL = Intake(full=True, retry_after=7)


def code(error: RequestError | None) -> tuple[int, str | None, int] | None:
    return None if error is None else (error.status, error.code, error.retry_after)


# --- the gate


def test_the_engine_says_when_the_queue_is_full() -> None:
    gate = Gate(LIMITS)
    assert gate.check(NO_KEY) is None
    gate.hear(FULL)
    assert code(gate.check(NO_KEY)) == (429, "queue_full", 7)
    gate.hear(Intake(full=False, retry_after=7))
    assert gate.check(NO_KEY) is None


def test_who_leaves_a_full_queue_makes_room_for_one_before_the_engine_says_so() -> None:
    gate = Gate(LIMITS)
    gate.enter(NO_KEY, 1)
    gate.hear(FULL)
    gate.leave(NO_KEY, 1)
    assert code(gate.check(NO_KEY)) == (429, "queue_full", 7)
    gate.vacate(1)
    assert gate.check(NO_KEY) is None and gate.check(NO_KEY, 2) is not None
    gate.enter(NO_KEY, 1)
    assert code(gate.check(NO_KEY)) == (429, "queue_full", 7)
    gate.vacate(1)
    gate.hear(FULL)
    assert code(gate.check(NO_KEY)) == (429, "queue_full", 7)


def test_a_worker_knows_what_it_has_open_itself() -> None:
    gate = Gate(LIMITS)
    gate.enter(NO_KEY, 5)
    gate.enter(NO_KEY, 1)
    assert code(gate.check(NO_KEY)) == (429, "queue_full", 1)
    with pytest.raises(RequestError):
        gate.enter(NO_KEY, 1)
    gate.leave(NO_KEY, 1)
    assert gate.check(NO_KEY) is None


def test_what_can_never_be_taken_is_no_matter_of_trying_again() -> None:
    with pytest.raises(RequestError, match="ask for fewer") as refused:
        Gate(LIMITS).enter(NO_KEY, 7)
    assert refused.value.status == 400


def test_keys_have_their_shares() -> None:
    gate = Gate(LIMITS)
    gate.enter(0, 3)
    assert code(gate.check(0)) == (429, "rate_limit_exceeded", 1)
    assert gate.check(1) is None
    gate.leave(0, 3)
    assert gate.check(0) is None


def test_not_ready_comes_before_full() -> None:
    unready = RequestError("ending", code="server_overloaded", status=503)
    gate = Gate(LIMITS, lambda: unready)
    gate.hear(FULL)
    assert gate.check(NO_KEY) is unready


# --- the head, and the route


def doorman(gate: Gate, *keys: str) -> Doorman:
    return Doorman(Door(Access(api_keys=keys)), gate, frozenset({"/v1/completions"}))


def test_only_what_waits_for_the_engine_is_refused_by_its_head() -> None:
    gate = Gate(LIMITS)
    gate.hear(FULL)
    for method, path in (("GET", "/health"), ("POST", "/tokenize"), ("GET", "/v1/completions"), ("POST", "/metrics")):
        assert doorman(gate).admit(method, path, {}).error is None
    refused = doorman(gate).admit("POST", "/v1/completions", {}).error
    assert refused is not None and (refused.status, refused.code) == (429, "queue_full")


def test_who_brings_no_key_learns_nothing_of_the_queue() -> None:
    gate = Gate(LIMITS)
    gate.hear(FULL)
    for headers in ({}, {"AUTHORIZATION": "Bearer wrong"}, {"AUTHORIZATION": "Basic a"}):
        refused = doorman(gate, "a", "b").admit("POST", "/v1/completions", headers).error
        assert refused is not None and refused.status == 401
    entry = doorman(gate, "a", "b").admit("POST", "/v1/completions", {"AUTHORIZATION": "Bearer b"})
    assert (entry.client, code(entry.error)) == (1, (429, "queue_full", 7))


class Resource:
    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.media = {"client": req.context.terms.client, "seconds": req.context.terms.seconds}


def client(gate: Gate, *keys: str) -> falcon.testing.TestClient:
    routes = [(Route("/ask", Resource(), queued=True), "a"), (Route("/health", Resource()), "a")]
    return falcon.testing.TestClient(build_app(routes, Access(api_keys=keys), gate=gate))


def test_a_full_queue_is_a_429_before_the_responder_runs() -> None:
    gate = Gate(LIMITS)
    gate.hear(FULL)
    answer = client(gate).simulate_post("/ask")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json["error"]["code"] == "queue_full"


def test_keys_are_asked_first_and_tell_whose_request_it_is() -> None:
    gate = Gate(LIMITS)
    asked = client(gate, "a", "b")
    gate.hear(FULL)
    assert asked.simulate_post("/ask").status_code == 401
    gate.hear(Intake(full=False, retry_after=1))
    answer = asked.simulate_post("/ask", headers={"Authorization": "Bearer b", "x-request-timeout": "2.5"})
    assert answer.json == {"client": 1, "seconds": 2.5}


@pytest.mark.parametrize(
    "given",
    [
        "",
        "soon",
        "0",
        "-1",
        "nan",
        "inf",
        "1e999",
        "1_0",
        "+5",
        "0x5",
        "5s",
        "5 5",
        "\u0665",
        "1" * 20,
        "0.0",
        ".",
        "5.",
    ],
)
def test_a_time_limit_is_a_number_above_0(given: str) -> None:
    answer = client(Gate()).simulate_post("/ask", headers={"x-request-timeout": given})
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "x-request-timeout")


# --- deadlines


@dataclass
class Clock:
    now: float = 100.0
    called: list[str] = field(default_factory=list)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_deadlines_come_in_their_order_and_once(clock: Clock) -> None:
    kept = Deadlines()
    kept.add(103.0, lambda: clock.called.append("late"))
    kept.add(101.0, lambda: clock.called.append("early"))
    kept.add(102.0, lambda: clock.called.append("never")).cancel()
    for clock.now in (100.9, 101.0, 110.0, 120.0):
        kept.expire()
    assert clock.called == ["early", "late"]


def test_one_that_raises_takes_no_other_along(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    kept = Deadlines()
    kept.add(101.0, lambda: 1 // 0)
    kept.add(101.0, lambda: clock.called.append("next"))
    clock.now = 101.0
    kept.expire()
    assert clock.called == ["next"] and "ZeroDivisionError" in caplog.text


def test_what_was_called_off_is_not_kept(clock: Clock) -> None:
    kept = Deadlines()
    for _ in range(50_000):
        kept.add(1000.0, lambda: None).cancel()
    assert len(kept._heap) < 5000


def test_patience_is_short_while_something_may_be_due() -> None:
    kept = Deadlines()
    assert kept.patience(0.25) == 0.25
    deadline = kept.add(time.monotonic() + 100, lambda: None)
    assert kept.patience(0.25) < 0.1
    deadline.cancel()
    kept.expire()
    assert kept.patience(0.25) == 0.25


# --- a generation under them

TOKENIZER: list[FastTokenizer] = []


@pytest.fixture(scope="module", autouse=True)
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    TOKENIZER[:] = [load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))]


class Writer:
    def __init__(self) -> None:
        self.errors: list[RequestError] = []

    def write(self, *given: object) -> None:
        pass

    def done(self) -> None:
        pass

    def failed(self, error: RequestError) -> None:
        self.errors.append(error)


@dataclass
class Run:
    """A generation of one prompt under `limits`, whose bridge answers when the test says so."""

    limits: Admission = field(default_factory=Admission)
    terms: Terms = field(default_factory=Terms)
    gate: Gate = field(default_factory=lambda: Gate(LIMITS))

    def __post_init__(self) -> None:
        self.bridge = FakeBridge(wait=True)
        front = fake_front(self.bridge, TOKENIZER[0], config=Config(plugin_options=asdict(self.limits)))
        self.front = FakeFront(**{**vars(front), "gate": self.gate})
        self.writer = Writer()

    def start(self, n: int = 1) -> None:
        reply = Reply(FakeTransport(falcon.Response()))
        reply.terms = self.terms
        submit = Submit(id=self.front.next_id(), prompt=Prompt.of([0] * 2), max_new_tokens=9, n=n)
        request = Request(submits=[submit], rules=TextRules(), dialect="x", request_id="r")
        Generation(self.front, reply, request).start(self.writer)

    def expire_after(self, seconds: float) -> list[str | None]:
        """As if so much time went by, and nothing else did."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.terms.received + seconds))
            self.front.deadlines.expire()
        return [error.code for error in self.writer.errors]


def test_no_limit_by_default() -> None:
    run = Run()
    run.start()
    assert run.front.deadlines.patience(9.0) == 9.0


def test_a_request_ends_when_its_time_is_over() -> None:
    run = Run(Admission(request_timeout=0.05))
    run.start()
    assert run.expire_after(0.0) == []
    assert run.expire_after(0.06) == ["request_timeout"]
    assert run.writer.errors[0].status == 504 and run.bridge.aborted == [1]
    assert [(record.finish, record.cause) for record in run.front.records] == [("error", "deadline")]


def test_the_first_token_has_its_own_limit() -> None:
    run = Run(Admission(first_token_timeout=0.05))
    run.start()
    assert run.expire_after(0.06) == ["first_token_timeout"]
    run = Run(Admission(first_token_timeout=0.05))
    run.start()
    run.bridge.step()
    assert run.expire_after(0.06) == []


@pytest.mark.parametrize(("server", "client"), [(0.0, 0.03), (9.0, 0.03), (0.03, 9.0)])
def test_the_shorter_limit_counts(server: float, client: float) -> None:
    run = Run(Admission(request_timeout=server), Terms(seconds=client))
    run.start()
    assert run.expire_after(0.04) == ["request_timeout"]


def test_who_is_done_is_out_and_forgotten() -> None:
    run = Run(Admission(request_timeout=0.02), Terms(client=2))
    run.start(n=3)
    assert run.bridge.submitted[0].client == 2
    assert code(run.gate.check(2)) == (429, "rate_limit_exceeded", 1)
    for _ in range(9):
        run.bridge.step()
    assert run.gate.check(2) is None
    assert run.expire_after(0.03) == []


def test_a_refused_request_leaves_nothing_behind() -> None:
    run = Run()
    run.gate.enter(NO_KEY, 6)
    with pytest.raises(RequestError):
        run.start()
    assert run.bridge.submitted == []
    assert [(record.finish, record.cause) for record in run.front.records] == [("error", "overload")]
    run.gate.leave(NO_KEY, 6)
    run.start()


def test_the_gate_counts_right_under_many_threads() -> None:
    gate = Gate(Bounds(waiting=NO_BOUND, tokens=NO_BOUND, per_key=NO_BOUND, open=50))
    taken, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal taken, most
        for _ in range(300):
            try:
                gate.enter(NO_KEY, 9)
            except RequestError:
                continue
            with lock:
                taken += 9
                most = max(most, taken)
            with lock:
                taken -= 9
            gate.leave(NO_KEY, 9)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 50
    gate.enter(NO_KEY, 50)
