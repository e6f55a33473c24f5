"""`python -m llmcore_devtools.fake_engine FD`: an engine that echoes prompts. It tests servers without a model.

It exchanges the same messages as the real engine. An answer repeats the tokens of its prompt. Prompt and answer have
at most 4,096 tokens together, or `max_req_total_len`. Options in `config.plugin_options`:

- ``fake_step_seconds``: seconds of a step (0.005),
- ``fake_load_seconds``: seconds until it is ready (0),
- ``fake_stops``: true lets the tokens that end a model's answers end these too,
- ``fake_fail``: a message with which the start fails,
- ``fake_hang_token``: a prompt with this id makes the engine hang for ever.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import msgspec
import zmq
from llmcore.api.bridge import Abort, Finish, FinishChoice, Load, ModelFacts, StepEvents, Submit
from llmcore.api.errors import ConfigError
from llmcore_server import child
from llmcore_server.messages import (
    EngineLaunch,
    EngineReady,
    Hello,
    Mailbox,
    Outlet,
    Probe,
    Progress,
    Shutdown,
    Snapshot,
    ToEngine,
    ToSupervisor,
    WorkerGone,
)

FACTS = ModelFacts(
    architecture="Echo",
    vocab_size=1000,
    max_input_len=4000,
    max_total_len=4096,
    kv_tokens=100_000,
    max_running=1000,
    eos_ids=(257,),
)


class EngineWithoutModel:
    """The process of an engine without a model: its mailboxes and its reports. A subclass makes the tokens.

    `workers`: an outlet for the events of each HTTP worker. `report_due`: the time.monotonic() of the next report.
    """

    facts: ModelFacts

    def __init__(self, launch: EngineLaunch, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.launch = launch
        self.context = context
        self.options = launch.config.plugin_options
        self.workers: dict[int, Outlet] = {}
        self.steps = self.aborts = self.prompt_tokens = self.output_tokens = 0
        self.stopping = False
        self.report_due = 0.0

    def run(self) -> None:
        """Serve until told to stop."""
        control = Outlet(self.context, self.launch.control)
        inbox: Mailbox[ToEngine] = Mailbox(self.context, self.launch.mailbox, ToEngine)
        control.send(ToSupervisor(self.launch.name, Progress("weights", 1, 1)))
        control.send(ToSupervisor(self.launch.name, EngineReady(self.facts)))
        while not self.stopping:
            inbox.wait(min(self.patience(), self.launch.report_seconds))
            for message in inbox.drain():
                self.handle(message)
            self.advance()
            if time.monotonic() >= self.report_due:
                self.report_due = time.monotonic() + self.launch.report_seconds
                control.send(ToSupervisor(self.launch.name, Snapshot(self.load())))
        inbox.close()
        for outlet in (control, *self.workers.values()):
            outlet.close()

    def handle(self, message: ToEngine) -> None:
        """Handle one message of a worker or of the supervisor."""
        match message.body:
            case Hello():
                self.workers[message.sender] = Outlet(self.context, message.body.mailbox)
            case WorkerGone():
                self.forget(message.body.worker)
                if message.body.worker in self.workers:
                    self.workers.pop(message.body.worker).close(0.0)
            case Probe():
                self.report_due = 0.0
            case Shutdown():
                self.stopping = True

    def patience(self) -> float:
        """The most seconds to wait for a message."""
        raise NotImplementedError

    def advance(self) -> None:
        """Make the tokens that are due."""
        raise NotImplementedError

    def forget(self, worker: int) -> None:
        """End the requests of a worker that died."""
        raise NotImplementedError

    def held(self) -> tuple[int, int]:
        """The number of running requests, and the slots that they hold."""
        raise NotImplementedError

    def load(self) -> Load:
        """The figures."""
        running, live = self.held()
        return Load(
            running=running,
            kv_live=live,
            kv_free=self.facts.kv_tokens - live,
            kv_total=self.facts.kv_tokens,
            kv_granule=1,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            aborts=self.aborts,
            taken=time.time(),
        )


@dataclass
class _Running:
    """One request: the choices that still run, and the number of tokens that each has."""

    submit: Submit
    prompt: list[int]
    choices: dict[int, int]

    @property
    def slots(self) -> int:
        return len(self.prompt) + sum(self.choices.values())


class FakeEngine(EngineWithoutModel):
    """The engine that echoes prompts. Raises ConfigError as `fake_fail` demands."""

    facts = FACTS

    def __init__(self, launch: EngineLaunch, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(launch, context)
        if longest := launch.config.memory.max_req_total_len:
            self.facts = msgspec.structs.replace(FACTS, max_total_len=longest, max_input_len=longest - 96)
        if message := self.options.get("fake_fail"):
            raise ConfigError(message)
        time.sleep(self.options.get("fake_load_seconds", 0))
        self.step_seconds = self.options.get("fake_step_seconds", 0.005)
        self.running: dict[tuple[int, int], _Running] = {}

    def patience(self) -> float:
        """A step, or until the next report."""
        return self.step_seconds if self.running else self.launch.report_seconds

    def advance(self) -> None:
        """Make a step, if a request runs."""
        if self.running:
            self.step()
            time.sleep(self.step_seconds)

    def handle(self, message: ToEngine) -> None:
        """Handle one message of a worker or of the supervisor."""
        owner, body = message.sender, message.body
        match body:
            case Submit():
                prompt = body.prompt.ids.tolist()
                if self.options.get("fake_hang_token") in prompt:
                    time.sleep(3600)
                self.running[owner, body.id] = _Running(
                    body, prompt, {n: len(body.produced.get(n, ())) for n in body.produced or range(body.n)}
                )
                self.prompt_tokens += len(prompt)
            case Abort():
                self.aborts += self.running.pop((owner, body.id), None) is not None
            case FinishChoice():
                self.end_choice(owner, body.id, body.choice)
            case Probe():
                self.steps += not self.running
        super().handle(message)

    def step(self) -> None:
        """Send one token for every running choice."""
        self.steps += 1
        events: dict[int, StepEvents] = {}
        for (owner, number), request in list(self.running.items()):
            mine = events.setdefault(owner, _no_events())
            for choice, done in list(request.choices.items()):
                token = request.prompt[done % len(request.prompt)]
                request.choices[choice] += 1
                finish = Finish.LENGTH if done + 1 >= request.submit.max_new_tokens else Finish.RUNNING
                if self.options.get("fake_stops") and token in request.submit.stop_ids:
                    finish = Finish.STOP
                mine.request.append(number)
                mine.choice.append(choice)
                mine.count.append(1)
                mine.tokens.append(token)
                mine.finish.append(finish)
                self.output_tokens += 1
                if finish is not Finish.RUNNING:
                    self.end_choice(owner, number, choice)
        for owner, batch in events.items():
            self.workers[owner].send(batch)

    def end_choice(self, owner: int, number: int, choice: int) -> None:
        """End a choice in which a worker found a stop text."""
        request = self.running.get((owner, number))
        if request is not None and choice in request.choices:
            del request.choices[choice]
            if not request.choices:
                del self.running[owner, number]

    def forget(self, worker: int) -> None:
        """End the requests of a worker that died."""
        for key in [key for key in self.running if key[0] == worker]:
            del self.running[key]
            self.aborts += 1

    def held(self) -> tuple[int, int]:
        """The number of running requests, and the slots that they hold."""
        return len(self.running), sum(request.slots for request in self.running.values())


def _no_events() -> StepEvents:
    return StepEvents(stamp=time.monotonic(), request=[], choice=[], count=[], tokens=[], finish=[])


def main(engine: type[EngineWithoutModel] = FakeEngine) -> int:
    """The process of such an engine; its exit code."""
    launch = child.begin(EngineLaunch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        engine(launch, context).run()
    except Exception as error:  # noqa: BLE001 - reported to the supervisor, as the real engine does
        child.report_failure(launch, error)
        return 1
    context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
