"""A whole engine without a model: random requests against a real scheduler, with everything checked at every step.

`simulate` is the conformance check for scheduling policies, length estimators and KV managers. No granule leaks, and
no two requests write one. A request reads only its own KV. Every answer is the one that the request would get alone.
Every request ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from llmcore.api.bridge import BeamSearch, Finish, Prompt, StepEvents, Submit, explode
from llmcore.api.protocols import KVManager, LengthEstimator, SchedulerLimits, SchedulerPolicy
from llmcore.kv.space import KVGroup
from llmcore.registry.loader import load
from llmcore.sched.isolation import TRIALS
from llmcore.sched.plan import StepPlan, StepResult
from llmcore.sched.request import Lease, Totals
from llmcore.sched.scheduler import Scheduler

from llmcore_devtools.simulated_device import SimulatedDevice, answer, searched

FAILED = ("internal_error", "the step failed")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A random trace and the engine it runs on. Rates are per step, or per request for `cursed`, `poisoned` and
    `searches`, those that are answered by a beam search.

    `granules`: one KV group each. `slots`: tokens of each group, whole granules of the coarsest. `failures` are steps
    that cannot be launched, or cannot be read. `cursed` requests make every step fail that they are in; `poisoned`
    ones give logits that are not finite at some position. `crowd`: steps of more rows than this fail, 0 for none.
    `priorities`: of which each request gets one; () for none. `drafts`: a drafter proposes at most this number of
    tokens to each row that decodes, of which any number is right; now and then the row gives nothing at all. `loads`:
    the share of requests whose beginning a source writes, a part at a time, or not at all until the lease is over.
    `continued`: the share of requests that come with tokens which another engine has produced.
    """

    seed: int = 0
    requests: int = 20
    granules: tuple[int, ...] = (1,)
    slots: int = 256
    max_running: int = 8
    batch_tokens: int = 32
    chunk_tokens: int = 16
    stall_tokens: int = 0
    chunked: bool = True
    wait_steps: int = 0
    token_ratio: float | None = None
    ahead: int = 0
    longest_prompt: int = 40
    longest_answer: int = 24
    most_choices: int = 3
    arrivals: float = 0.7
    aborts: float = 0.0
    finishes: float = 0.0
    failures: float = 0.0
    cursed: float = 0.0
    poisoned: float = 0.0
    crowd: int = 0
    searches: float = 0.0
    priorities: tuple[int, ...] = ()
    drafts: int = 0
    loads: float = 0.0
    continued: float = 0.0
    vocab: int = 50


@dataclass
class Client:
    """One request as its client sees it: tokens by choice, and how each choice ended.

    `failed`: steps with it that failed. `alone`: those of them without any other request.
    """

    submit: Submit
    owner: int
    prompt: list[int]
    cursed: bool
    poison_at: int | None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, Finish] = field(default_factory=dict)
    aborted: bool = False
    failed: int = 0
    alone: int = 0

    @property
    def done(self) -> bool:
        """True if it waits for nothing more."""
        return self.aborted or len(self.ended) == self.submit.n


@dataclass(eq=False)
class Writer:
    """A KVSource that writes what a device would compute of `known`, a part at a time. `stalls`: it never ends."""

    known: list[int]
    tokens: int
    seconds: float
    stalls: bool
    lease: Lease | None = None
    at: int = 0
    began: int = 0

    def begin(self, lease: Lease) -> None:
        """Llmcore's side: see KVSource."""
        self.lease, self.at = lease, lease.start
        self.began += 1

    def cancel(self, lease: Lease) -> None:
        """Llmcore's side: see KVSource."""
        assert lease is self.lease, "a lease is cancelled that is not open"
        self.lease = None


@dataclass(frozen=True)
class Report:
    """The outcome, for assertions about a policy: the scheduler's own totals, the number of steps, and the clients."""

    totals: Totals
    steps: int
    clients: list[Client]
    filled: int
    """Leases that were filled."""


class Simulation:
    """One run of a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        policy: Callable[[SchedulerLimits], SchedulerPolicy],
        estimator: Callable[[SchedulerLimits], LengthEstimator],
        manager: Callable[[int], KVManager],
    ) -> None:
        self._scenario = scenario
        self._random = np.random.default_rng(scenario.seed)
        self._groups = _groups(scenario, manager)
        limits = _limits(scenario)
        self._guaranteed = estimator(limits).guaranteed
        self._scheduler = Scheduler(
            limits,
            self._groups,
            policy(limits),
            estimator(limits),
            ahead=scenario.ahead,
            priorities=True,
            drafts=scenario.drafts,
        )
        drafter = self._draft if scenario.drafts else None
        self._device = SimulatedDevice(self._groups, vocab=scenario.vocab, bad=self._is_bad, drafter=drafter)
        self._roots = [self._draw_tokens(scenario.longest_prompt) for _ in range(3)]
        self._clients: dict[tuple[int, int], Client] = {}
        self._flying: deque[tuple[StepPlan, StepResult | None]] = deque()
        self._steps = 0
        self._writers: list[Writer] = []
        self._filled = 0

    def run(self) -> Report:
        """Serve everything; AssertionError where something is not as it must be."""
        waiting = self._scenario.requests
        idle = 0
        while waiting or not all(client.done for client in self._clients.values()):
            while waiting and self._random.random() < self._scenario.arrivals:
                self._arrive()
                waiting -= 1
            self._interfere()
            self._write()
            progress = self._step() or any(writer.lease for writer in self._writers)
            self._check()
            idle = 0 if progress or waiting else idle + 1
            assert idle < 3, "requests wait, nothing is in flight, and nothing is planned: starvation"
            assert self._steps < 2000 * self._scenario.requests, "requests do not end: starvation"
        while self._flying:
            self._read()
            self._check()
        self._check_end()
        return Report(self._scheduler.totals, self._steps, list(self._clients.values()), self._filled)

    def _step(self) -> bool:
        plan = self._scheduler.plan()
        if plan is not None:
            self._steps += 1
            assert plan.n_tokens <= self._scenario.batch_tokens, "a step exceeds its budget"
            loading = {writer.lease.row for writer in self._writers if writer.lease is not None}
            assert not loading & {*plan.request.tolist()}, "a choice is in a step before its KV is there"
            self._launch(plan)
        if self._flying and (plan is None or len(self._flying) > self._scenario.ahead):
            self._read()
            return True
        return plan is not None

    def _launch(self, plan: StepPlan) -> None:
        clients = {id(client): client for client in map(self._client_at, plan.request.tolist())}.values()
        broken = any(client.cursed for client in clients) or 0 < self._scenario.crowd < plan.request.size
        if broken or self._random.random() < self._scenario.failures:
            for client in clients:
                client.failed += 1
                client.alone += len(clients) == 1
            if self._random.random() < 0.5:
                # Nothing of it has reached the device.
                while self._flying:
                    self._read()
                self._receive(self._scheduler.fail(plan, FAILED))
                return
            broken = True
        result = self._device.run(plan, broken=broken)
        self._flying.append((plan, None if broken else result))

    def _read(self) -> None:
        plan, result = self._flying.popleft()
        if result is None:
            self._flying.clear()
            self._receive(self._scheduler.fail(plan, FAILED))
        else:
            self._receive(self._scheduler.commit(plan, result))

    def _receive(self, events: dict[int, StepEvents]) -> None:
        for owner, columns in events.items():
            for request, event in explode(columns):
                client = self._clients[owner, request]
                assert not client.aborted and event.choice not in client.ended, "an event after the end"
                tokens = client.tokens.setdefault(event.choice, [])
                assert (event.cached >= 0) == (not tokens and bool(event.tokens)), "cached comes with the first token"
                tokens.extend(event.tokens)
                if event.finish is not Finish.RUNNING:
                    client.ended[event.choice] = event.finish
                    self._check_answer(client, event.choice)

    def _check_answer(self, client: Client, choice: int) -> None:
        submit, tokens, search = client.submit, client.tokens[choice], client.submit.beams is not None
        if search:
            alone = searched(client.prompt, submit, self._scenario.vocab)[choice]
        else:
            alone = self._alone(client.prompt, submit, choice)
        finish = client.ended[choice]
        assert tokens == alone[: len(tokens)], "an answer is not what it would have been alone"
        if finish is Finish.ERROR:
            assert self._to_blame(client), "a request ended with another's error"
            assert not (search and tokens), "a search failed and gave tokens"
            return
        stopped = alone[-1] in submit.stop_ids and len(alone) > submit.min_new_tokens
        assert len(tokens) == len(alone), "an answer has another length than alone"
        assert finish is (Finish.STOP if stopped else Finish.LENGTH), "an answer ended for another reason than alone"

    def _alone(self, prompt: list[int], submit: Submit, choice: int) -> list[int]:
        """The whole answer to a request that runs by itself."""
        tokens = answer(prompt, choice, submit.max_new_tokens, self._scenario.vocab)
        for at, token in enumerate(tokens, start=1):
            if token in submit.stop_ids and at > submit.min_new_tokens:
                return tokens[:at]
        return tokens

    def _to_blame(self, client: Client) -> bool:
        """True if this request must cause the failures of its steps: of two or more, it was alone in one."""
        again = client.failed > 1 and client.alone > 0
        return client.poison_at is not None or again or client.failed >= TRIALS

    def _check(self) -> None:
        self._scheduler.check()
        load = self._scheduler.load()
        assert load.kv_live + load.kv_cached + load.kv_free == load.kv_total
        stats = self._scheduler.queue_stats()
        assert load.waiting <= stats.choices <= stats.tokens * self._scenario.max_running, "the queue is miscounted"
        assert load.waiting or not stats.tokens, "tokens wait without a request"

    def _check_end(self) -> None:
        assert self._scheduler.idle, "something is left when all requests have ended"
        assert all(writer.lease is None and writer.began < 2 for writer in self._writers), "a lease is left open"
        for group in self._groups:
            assert group.pool.live == 0, "slots leaked: no request runs, and some are live"
            group.make_free(group.pool.total)
            assert group.pool.free == group.pool.total, "the cache keeps granules that it does not evict"
        scenario = self._scenario
        quiet = not (scenario.failures or scenario.cursed or scenario.poisoned or scenario.crowd)
        if self._guaranteed and quiet:
            assert self._scheduler.totals.preemptions == 0, "a guaranteed estimator, and a request was preempted"

    # --- the clients -------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        scenario, random = self._scenario, self._random
        longest = int(random.integers(1, scenario.longest_prompt + 1))
        root = self._roots[int(random.integers(len(self._roots)))][: int(random.integers(0, longest + 1))]
        prompt = root + self._draw_tokens(longest - len(root)) if random.random() < 0.7 else root or [1]
        max_new = int(random.integers(1, scenario.longest_answer + 1))
        poisoned = random.random() < scenario.poisoned
        submit = Submit(
            id=len(self._clients),
            prompt=Prompt.of(prompt),
            max_new_tokens=max_new,
            min_new_tokens=int(random.integers(0, 3)),
            stop_ids=tuple(int(t) for t in random.integers(0, scenario.vocab, int(random.integers(0, 3)))),
            n=int(random.integers(1, scenario.most_choices + 1)),
        )
        if scenario.priorities:
            priority = scenario.priorities[int(random.integers(len(scenario.priorities)))]
            submit = msgspec.structs.replace(submit, priority=priority, client=int(random.integers(-1, 3)))
        if scenario.searches and random.random() < scenario.searches:
            submit = msgspec.structs.replace(submit, beams=self._draw_search(submit.n))
        if scenario.continued and submit.beams is None and random.random() < scenario.continued:
            submit = msgspec.structs.replace(submit, produced=self._draw_produced(prompt, submit))
        owner = int(random.integers(2))
        client = Client(
            submit,
            owner,
            prompt,
            cursed=bool(random.random() < scenario.cursed),
            poison_at=int(random.integers(0, len(prompt) + max_new)) if poisoned else None,
        )
        if submit.produced:
            client.tokens = {number: [*tokens] for number, tokens in submit.produced.items()}
            client.ended = {number: Finish.STOP for number in range(submit.n) if number not in submit.produced}
        self._clients[owner, submit.id] = client
        writer, known = None, [*prompt, *(client.tokens.get(0, ()) if submit.n == 1 else ())]
        if scenario.loads and random.random() < scenario.loads and len(known) > 1:
            stalls = bool(random.random() < 0.3)
            seconds = 0.0 if stalls or random.random() < 0.2 else 1e9
            writer = Writer(known, int(random.integers(1, len(known))), seconds, stalls)
            self._writers.append(writer)
        self._scheduler.submit(submit, owner, source=writer)

    def _draw_produced(self, prompt: list[int], submit: Submit) -> dict[int, tuple[int, ...]]:
        """Some choices of a request, one at least, and the beginning of each one's answer."""
        random = self._random
        some = random.permutation(submit.n)[: int(random.integers(1, submit.n + 1))].tolist()
        alone = {number: self._alone(prompt, submit, number) for number in some}
        return {number: tuple(tokens[: int(random.integers(len(tokens)))]) for number, tokens in alone.items()}

    def _write(self) -> None:
        """Let every source go on, and take expired leases back now and then."""
        for writer in self._writers:
            lease = writer.lease
            if lease is None or self._random.random() < 0.4:
                continue
            end = min(writer.at + int(self._random.integers(1, 12)), lease.end - writer.stalls)
            self._device.write(lease, writer.known, writer.at, end)
            writer.at = max(end, writer.at)
            if writer.at == lease.end:
                writer.lease = None
                self._filled += 1
                self._scheduler.filled(lease)
        if self._writers and self._random.random() < 0.2:
            self._scheduler.lapse(time.monotonic())

    def _interfere(self) -> None:
        for (owner, request), client in self._clients.items():
            if client.done:
                continue
            if self._random.random() < self._scenario.aborts:
                client.aborted = True
                self._scheduler.abort(owner, request)
            elif self._random.random() < self._scenario.finishes:
                choice = int(self._random.integers(client.submit.n))
                tokens = client.tokens.get(choice)
                if tokens and choice not in client.ended:
                    client.ended[choice] = Finish.STOP
                    self._scheduler.finish(owner, request, choice, int(self._random.integers(len(tokens) + 1)))

    def _client_at(self, index: int) -> Client:
        owner, request = self._scheduler.who(index)
        return self._clients[owner, request]

    def _is_bad(self, index: int, start: int, end: int) -> bool:
        poison = self._client_at(index).poison_at
        return poison is not None and start <= poison < end

    def _draft(self, most: int) -> int:
        """The number of right ones among `most` drafted tokens; -1 if the row gives nothing at all."""
        return int(self._random.integers(-1 if self._random.random() < 0.1 else 0, most + 1))

    def _draw_search(self, n: int) -> BeamSearch:
        width = max(2, int(self._random.integers(n, self._scenario.most_choices + 1)))
        stopping = (False, True, None)[int(self._random.integers(3))]
        return BeamSearch(width, float(self._random.integers(-1, 3)), stopping)

    def _draw_tokens(self, n: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._scenario.vocab, n)]


def simulate(
    policy: Callable[[SchedulerLimits], SchedulerPolicy] | None = None,
    scenario: Scenario | None = None,
    *,
    estimator: Callable[[SchedulerLimits], LengthEstimator] | None = None,
    manager: Callable[[int], KVManager] | None = None,
) -> Report:
    """Run a scenario with what the `make` of specs makes; the built-in ones where none is given.

    AssertionError says what went wrong.
    """
    return Simulation(
        scenario or Scenario(),
        policy or load("llmcore.builtin.fcfs:FCFS"),
        estimator or load("llmcore.builtin.estimators:Capped"),
        manager or load("llmcore.builtin.radix:RadixCache"),
    ).run()


def _limits(scenario: Scenario) -> SchedulerLimits:
    return SchedulerLimits(
        max_running=scenario.max_running,
        max_input_len=scenario.longest_prompt,
        max_total_len=scenario.longest_prompt + scenario.longest_answer,
        batch_tokens=scenario.batch_tokens,
        chunk_tokens=scenario.chunk_tokens,
        stall_tokens=scenario.stall_tokens,
        wait_steps=scenario.wait_steps,
        token_ratio=scenario.token_ratio,
        capped_new_tokens=4,
        chunked=scenario.chunked,
    )


def _groups(scenario: Scenario, manager: Callable[[int], KVManager]) -> Sequence[KVGroup]:
    return [
        KVGroup(
            name=f"group{i}",
            total=scenario.slots // granule,
            granule=granule,
            rows=scenario.max_running,
            max_len=scenario.longest_prompt + scenario.longest_answer,
            manager=manager(granule),
        )
        for i, granule in enumerate(scenario.granules)
    ]
