"""The engine: requests in, events out, one step after the other.

Everything here is for one thread. With `device.ahead` steps in flight, the next step is planned and enqueued before
the last one's tokens are read.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch

from llmcore.api.bridge import MOST_LOGPROBS_AT_ONCE, Finish, Load, ModelFacts, SamplingParams, StepEvents, Submit
from llmcore.api.errors import LlmcoreError, RequestError, reraise_if_stopping, text_of
from llmcore.api.protocols import Device
from llmcore.engine.leader import Runner
from llmcore.engine.model_runner import GroupKV, Launched
from llmcore.engine.processor_build import ProcessorBuilder
from llmcore.engine.processors import Processors
from llmcore.sched.beam_search import check_search
from llmcore.sched.plan import StepPlan
from llmcore.sched.processors import Reason, Steered
from llmcore.sched.scheduler import QueueStats, Scheduler

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)

_LOOK_SECONDS = 1.0
_FAILED = ("internal_error", "the model failed on this request")
_SHORT = ("server_overloaded", "there is not enough memory for this request; shorten it, or send it again later")

POOLINGS = ("last", "mean")
"""Values of `Submit.pool`: the hidden state of a prompt's last token, or the mean over all its tokens."""

Events = dict[int, StepEvents]
"""Per owner (an HTTP worker's number), what a step did for it."""


class DeviceLost(LlmcoreError):
    """Nothing works on the device any more: every request is lost and the process must end."""


class Engine:
    """A scheduler and a runner. `facts` says what was built; `fixed_angles_up_to` is the ModelConfig's.

    `kv_salt`: a part of every request's salt, which names the layouts that store KV and their constants.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        device: Device,
        facts: ModelFacts,
        processors: Processors,
        fixed_angles_up_to: int | None = None,
        kv_salt: bytes = b"",
    ) -> None:
        self.facts = facts
        self._kv_salt = kv_salt
        self._fixed_angles_up_to = fixed_angles_up_to
        self._processors = processors
        self._builder = ProcessorBuilder(processors.bind)
        self._scheduler = scheduler
        self._runner = runner
        self._device = device
        self._flying: deque[Launched] = deque()
        self._looks_at = 0.0

    @property
    def kv(self) -> Sequence[GroupKV]:
        """The pools of each KV group on the device, to read between steps."""
        return self._runner.groups

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not self._flying and self._scheduler.idle and not self._builder.open

    def submit(self, request: Submit, owner: int = 0) -> None:
        """Queue a request. Raises RequestError if it is wrong, can never fit, or cannot be queued.

        One with logits processors is queued when they are made; if they cannot be, `step` returns the error.
        """
        with _own_failure(request):
            self._check(request)
            if request.sampling.logits_processors:
                self._scheduler.validate(request, owner)
                self._processors.check(request)
                self._builder.begin(request, owner)
            else:
                self._scheduler.submit(self._salted(request), owner)

    def abort(self, request_id: int, owner: int = 0) -> None:
        """End every choice of a request, for example after a client disconnect. One that has ended is ignored."""
        self._builder.forget(owner, request_id)
        self._scheduler.abort(owner, request_id)

    def finish(self, request_id: int, choice: int, n_tokens: int, owner: int = 0) -> None:
        """End one choice at its first `n_tokens` tokens; a choice that has ended is ignored."""
        self._scheduler.finish(owner, request_id, choice, n_tokens)

    def queue_stats(self) -> QueueStats:
        """The queue's figures; requests whose processors are being made count as waiting."""
        stats = self._scheduler.queue_stats()
        if not self._builder.open:
            return stats
        unmade = [making.request for making in self._builder.open.values()]
        return replace(
            stats,
            choices=stats.choices + sum(request.choices for request in unmade),
            tokens=stats.tokens + sum(len(request.prompt) for request in unmade),
        )

    def expire(self, seconds: float) -> Events:
        """End with an error the requests that have waited for `seconds` without running."""
        error = ("queue_timeout", f"The request found no place within {seconds:g} s; send it again later.")
        return self._scheduler.expire(time.monotonic() - seconds, error)

    def load(self) -> Load:
        """A snapshot."""
        load = self._scheduler.load()
        waiting = load.waiting + len(self._builder.open)
        return msgspec.structs.replace(load, waiting=waiting, graphs=self._runner.graphs, taken=time.time())

    def step(self) -> list[Events]:
        """Enqueue the next step, if there is one, and read what need not stay in flight; events in order.

        Raises DeviceLost.
        """
        given_up = self._admit_made() + self._give_up()
        plan = self._scheduler.plan()
        if plan is None:
            return [*given_up, self._read()] if self._flying else given_up
        steered = self._scheduler.steering(plan)
        events = given_up + self._enqueue(plan)
        if self._flying and self._flying[-1].logits is not None:
            # Its processors need the tokens of the steps before it; its own forward runs meanwhile.
            while len(self._flying) > 1:
                events.append(self._read())
            events += self._draw(steered)
        while len(self._flying) > self._device.ahead:
            events.append(self._read())
        return events

    def abandon(self, message: str) -> list[Events]:
        """The device is lost: everything ends with an error."""
        self._flying.clear()
        error = RequestError(message, code="engine_failed", status=503)
        unmade = [{making.owner: refusal(making.request, error)} for making in self._builder.open.values()]
        self._builder.open.clear()
        return [self._scheduler.abandon(("engine_failed", message)), *unmade]

    def _give_up(self) -> list[Events]:
        """Every _LOOK_SECONDS, end requests that wait for a processor for too long."""
        self._processors.threads.hurry()
        now = time.monotonic()
        if now < self._looks_at:
            return []
        self._looks_at = now + _LOOK_SECONDS
        self._processors.threads.tend()
        events = self._scheduler.give_up()
        return [events] if events else []

    def _admit_made(self) -> list[Events]:
        """Queue the requests whose logits processors are made. Returns the errors of those that
        cannot be served, and a notice for each whose processors leave out a part of their arguments."""
        events: list[Events] = []
        for made, result in self._builder.done() if self._builder.open else ():
            try:
                with _own_failure(made.request):
                    if isinstance(result, RequestError):
                        raise result
                    self._scheduler.submit(self._salted(made.request), made.owner, result.choices)
                    if result.unenforced:
                        events.append({made.owner: notice(made.request, result.unenforced)})
            except RequestError as error:
                events.append({made.owner: refusal(made.request, error)})
        return events

    def _enqueue(self, plan: StepPlan) -> list[Events]:
        try:
            self._flying.append(self._runner.enqueue(self._runner.prepare(plan)))
        except BaseException as error:  # noqa: BLE001 - whatever a model raises, _note logs it
            reraise_if_stopping(error)
            return self._failed(plan, error)
        return []

    def _draw(self, steered: Sequence[Steered]) -> list[Events]:
        """Enqueue the draw of the newest step; one that failed with those before it is not there any more."""
        if not self._flying:
            return []
        step = self._flying[-1]
        try:
            outcome = self._runner.draw(step, steered)
        except BaseException as error:  # noqa: BLE001 - whatever a kernel raises, _note logs it
            reraise_if_stopping(error)
            self._flying.pop()
            return self._failed(step.plan, error)
        if outcome.late:
            self._scheduler.postpone(step.plan, outcome.late)
        return [self._scheduler.expel(step.plan, outcome.errors)] if outcome.errors else []

    def _failed(self, plan: StepPlan, error: BaseException) -> list[Events]:
        """A step that was not enqueued, or not whole."""
        reason = self._note(plan, error)
        events = []
        while self._flying:  # one that cannot be read takes all after it along
            events.append(self._read())
        self._settle(plan)
        return [*events, self._scheduler.fail(plan, reason)]

    def _read(self) -> Events:
        flying = self._flying.popleft()
        try:
            result = self._runner.read(flying)
        except BaseException as error:  # noqa: BLE001 - whatever a model raises, _note logs it
            reraise_if_stopping(error)
            reason = self._note(flying.plan, error)
            # Later steps have used this step's tokens: they are discarded with it.
            self._flying.clear()
            self._settle(flying.plan)
            return self._scheduler.fail(flying.plan, reason)
        return self._scheduler.commit(flying.plan, result)

    def _settle(self, plan: StepPlan) -> None:
        """Wait for all enqueued steps: they read memory that the next step writes."""
        try:
            self._device.synchronize()
        except BaseException as error:  # noqa: BLE001 - whatever a device raises, _note logs it
            reraise_if_stopping(error)
            self._note(plan, error)

    def _note(self, plan: StepPlan, error: BaseException) -> Reason:
        """Log a failed step; the error of its requests that fail again. Raises DeviceLost if no other step can run."""
        logger.error("step %d of %d rows failed", plan.number, plan.request.size, exc_info=error)
        lost = "the device has failed" if self._device.sticky(error) else self._runner.unrepeatable
        if lost:
            raise DeviceLost(f"{lost}: {text_of(error)}") from error
        return _SHORT if isinstance(error, OUT_OF_MEMORY) else _FAILED

    def _salted(self, request: Submit) -> Submit:
        """KV is shared only among requests of one API key: how much of a prompt was there tells what others asked.
        KV with angles of its prompt's length is shared only among prompts of that length.
        """
        salt, length = self._kv_salt + request.scope, len(request.prompt)
        if self._fixed_angles_up_to is not None and length > self._fixed_angles_up_to:
            salt += b"/prompt:%d" % length
        return msgspec.structs.replace(request, salt=salt) if salt != request.salt else request

    def _check(self, request: Submit) -> None:
        """Raise RequestError for what this model cannot do, and for ids that are not in its vocabulary."""
        facts, sampling = self.facts, request.sampling
        if request.score != bool(facts.scores):
            does = "scores prompts and generates nothing" if facts.scores else "generates; it has no head that scores"
            raise _wrong(f"this model ({facts.architecture}) {does}")
        alone = (request.n, request.max_new_tokens, request.prompt_logprobs, request.beams) == (1, 1, False, None)
        if (request.score or request.pool) and not alone:
            raise _wrong(
                "a score or a hidden state comes alone: n and max_new_tokens have to be 1, without beams and "
                "prompt_logprobs",
                "n",
            )
        if request.pool:
            _check_pool(request, facts)
        if request.prompt_top and not (request.prompt_logprobs and 0 < request.prompt_top <= facts.vocab_size):
            raise _wrong(f"prompt_top: it needs prompt_logprobs and is at most {facts.vocab_size}", "prompt_top")
        if request.prompt_top and len(request.prompt) * (1 + request.prompt_top) > MOST_LOGPROBS_AT_ONCE:
            raise _wrong(
                f"prompt_top: of one prompt at most {MOST_LOGPROBS_AT_ONCE:,} log-probabilities are told", "prompt_top"
            )
        prompt, decay = request.prompt.ids, sampling.length_decay
        given: dict[str, Iterable[int]] = {
            "prompt": (int(prompt.min(initial=0)), int(prompt.max(initial=0))),
            "produced": itertools.chain.from_iterable(request.produced.values()),
            "logit_bias": sampling.logit_bias,
            "stop_token_ids": request.stop_ids,
            "allowed_ids": sampling.allowed_ids,
            "length_decay": () if decay is None else decay.ids,
        }
        for name, ids in given.items():
            if wrong := [token for token in ids if not 0 <= token < facts.vocab_size]:
                raise _wrong(f"{name}: token id {wrong[0]} is outside 0 to {facts.vocab_size - 1}", name)
        if request.beams is not None:
            check_search(request, facts.vocab_size)


def _wrong(message: str, param: str | None = None) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")


def _check_pool(request: Submit, facts: ModelFacts) -> None:
    """Raise RequestError for a hidden state that this model does not have, or that is not of the prompt alone."""
    if request.pool not in POOLINGS:
        raise _wrong(f"pooling is one of {', '.join(POOLINGS)}, not {request.pool!r}", "pooling")
    if not facts.embedding_size:
        raise RequestError(
            f"this model ({facts.architecture}) does not show its hidden states", code="unsupported_parameter"
        )
    if request.sampling != SamplingParams(temperature=0.0, seed=request.sampling.seed):
        raise _wrong("a hidden state is one greedy token and nothing else")


@contextmanager
def _own_failure(request: Submit) -> Iterator[None]:
    """An exception while a request is taken in ends that request, not the engine."""
    try:
        yield
    except RequestError:
        raise
    except BaseException as error:
        reraise_if_stopping(error)
        logger.exception("request %s could not be queued", request.request_id or request.id)
        raise RequestError("the engine failed on this request", code="internal_error", status=500) from error


def refusal(request: Submit, error: RequestError) -> StepEvents:
    """The events that end every choice of a request that was not accepted."""
    choices = list(range(max(request.n, 1)))
    return StepEvents(
        stamp=time.monotonic(),
        request=[request.id] * len(choices),
        choice=choices,
        count=[0] * len(choices),
        tokens=[],
        finish=[Finish.ERROR] * len(choices),
        error={row: (error.code or "invalid_value", error.message) for row in choices},
    )


def notice(request: Submit, unenforced: Sequence[str]) -> StepEvents:
    """The event that says what of a request that is accepted its processors do not enforce."""
    return StepEvents(
        stamp=time.monotonic(),
        request=[request.id],
        choice=[0],
        count=[0],
        tokens=[],
        finish=[Finish.RUNNING],
        unenforced={0: list(unenforced)},
    )
