"""The engines as an HTTP worker sees them: which one gets a request, and how it moves on when its engine dies."""

from __future__ import annotations

import logging
import threading

import msgspec
import zmq
from llmcore.api.balancing import Balancer
from llmcore.api.bridge import Abort, ChoiceEvent, Finish, FinishChoice, Load, Submit
from llmcore.api.errors import reraise_if_stopping
from llmcore.fleet.destinations import Destination, Stay, arrival_of
from llmcore.fleet.hits import Hits, chunks_of

from llmcore_server.messages import (
    EngineToWorker,
    Heartbeat,
    Hello,
    Intake,
    Mailbox,
    Outlet,
    Routed,
    ToEngine,
    ToSupervisor,
    WorkerLaunch,
)
from llmcore_server.settings import Server

logger = logging.getLogger(__name__)

LOST = ("engine_failed", "The engine has stopped; the request can be sent again when the server is back.")
"""The (code, message) of requests whose engine is gone."""

_RUNNING = Finish.RUNNING


class EngineLink(Destination):
    """The link to one engine, from its start to its end: an outlet to its mailbox, and a mailbox for what it sends.

    `intake`: its newest word on room. `seen`: the stamp of its newest step that was handled. `failing`: it has said
    that it ends.
    """

    def __init__(self, engine: int, outlet: Outlet, mailbox: Mailbox[EngineToWorker]) -> None:
        super().__init__()
        self.engine = engine
        self.name = f"engine-{engine}"
        self.outlet = outlet
        self.mailbox = mailbox
        self.intake = Intake(full=False, retry_after=1)
        self.seen = 0.0
        self.failing = False


class Sent:
    """A request at an engine, and what another engine needs to go on with it.

    `told`: the client has heard of an answer. `cached`: it has heard how much of the prompt was cached. `produced`:
    the tokens that it has, by choices that have not ended.
    """

    __slots__ = ("_answered", "cached", "link", "produced", "request", "stay", "told")

    def __init__(self, request: Submit, stay: Stay[EngineLink], before: Sent | None) -> None:
        self.request = request
        self.link = stay.at
        self.stay = stay
        self.told: bool = before is not None and before.told
        self.cached: bool = before is not None and before.cached
        self.produced: dict[int, list[int]] = before.produced if before else {one: [] for one in range(request.n)}
        self._answered = False

    def news(self, event: ChoiceEvent) -> ChoiceEvent | None:
        """The part of `event` that the client does not know. After a move, it knows how the answer began."""
        if not self._answered:
            self._answered = True
            self.stay.answered()
        known = self.cached and event.cached >= 0
        self.cached |= event.cached >= 0
        if known or (self.told and event.unenforced):
            event = msgspec.structs.replace(event, cached=-1 if known else event.cached, unenforced=())
            if not event.tokens and event.finish is _RUNNING:
                return None
        self.told = True
        tokens = self.produced.get(event.choice)
        if tokens is not None:
            tokens.extend(event.tokens)
        if event.finish is not _RUNNING:
            self.end(event.choice)
        return event

    def end(self, choice: int) -> None:
        """A choice has ended, and does not move."""
        self.produced.pop(choice, None)

    def onward(self) -> Submit | None:
        """The request for another engine; None if all its choices have ended. A beam search tells nothing before its
        end, so it begins again."""
        request, produced = self.request, {number: tuple(tokens) for number, tokens in self.produced.items()}
        if not produced:
            return None
        if len(produced) == request.n and not any(produced.values()):
            return request
        if produced.get(0) != ():  # the log-probabilities of the prompt came with the first token of choice 0
            request = msgspec.structs.replace(request, prompt_logprobs=False, prompt_top=0)
        return msgspec.structs.replace(request, produced=produced)


class Fleet:
    """All engines of a worker and its requests there. `lock` guards outlets and counts; no call blocks.

    `kv_tokens`: those that each engine's KV cache holds. `control`: leads to the supervisor, which tells other workers
    of the requests. `sent`: the requests that are open, by id. For any thread, except what handles messages:
    `connect`, `lose`, `move`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        launch: WorkerLaunch,
        kv_tokens: int,
        balancer: Balancer,
        control: Outlet,
        lock: threading.Lock,
    ) -> None:
        self._context = context
        self._launch = launch
        self._kv_tokens = kv_tokens
        self._balancer = balancer
        self._lock = lock
        self._control = control
        self._several = len(launch.engines) > 1
        self._shares = self._several and launch.config.section(Server).httpserver_workers > 1
        self._hits = Hits()
        self._links: dict[int, EngineLink] = {}
        self._made = 0
        self._dropped = 0
        self.sent: dict[int, Sent] = {}
        for engine in range(len(launch.engines)):
            self.connect(engine)

    # --- the engines

    def connect(self, engine: int) -> None:
        """Link up with the engine of this number, and tell it where to send events; not if there is a link."""
        if engine in self._links:
            return
        self._made += 1  # an engine that comes back gets a new mailbox: the last words of the dead one are not its own
        mine = self._launch.mailbox
        address = f"{mine}.{self._made}" if mine.startswith("ipc://") else f"{mine.rpartition(':')[0]}:*"
        mailbox: Mailbox[EngineToWorker] = Mailbox(self._context, address, EngineToWorker)
        link = EngineLink(engine, Outlet(self._context, self._launch.engines[engine]), mailbox)
        with self._lock:
            self._links[engine] = link
            self._post(link, Hello(mailbox.endpoint))

    def link(self, engine: int) -> EngineLink | None:
        """The link to the engine of this number, if it is there."""
        return self._links.get(engine)

    def links(self) -> list[EngineLink]:
        """The links to all engines that are there."""
        return list(self._links.values())

    def lose(self, link: EngineLink) -> list[Sent]:
        """An engine has died. Returns the requests that were there.

        Another engine may take its place and its address, and must not get messages for the dead one.
        """
        with self._lock:
            del self._links[link.engine]
            self._hits.lost(link.name)
            left = [sent for sent in self.sent.values() if sent.link is link]
            link.outlet.close(0.0)
        self._dropped += link.mailbox.dropped
        link.mailbox.close()
        return left

    def told(self, engine: int, load: Load) -> None:
        """The figures of an engine."""
        with self._lock:
            if link := self._links.get(engine):
                link.told(load.running + load.waiting, load.waiting_tokens, (load.kv_live, load.kv_total))

    def routed(self, message: Routed) -> None:
        """Another worker has sent a request to an engine."""
        with self._lock:
            if link := self._links.get(message.engine):
                link.shared(message.tokens)
                self._note(link, message.chunks)

    @property
    def intake(self) -> Intake:
        """The word of all engines on room: full if all are."""
        said = [link.intake for link in self.links()]
        return Intake(all(one.full for one in said), min((one.retry_after for one in said), default=1))

    @property
    def dropped(self) -> int:
        """The number of messages of engines that were not valid."""
        return self._dropped + sum(link.mailbox.dropped for link in self.links())

    def beat(self) -> None:
        """Tell every engine that this worker lives."""
        with self._lock:
            for link in self._links.values():
                self._post(link, Heartbeat(link.seen))

    def close(self) -> None:
        """Close every link; what was sent has a moment to leave."""
        with self._lock:
            for link in self._links.values():
                link.outlet.close()
                link.mailbox.close()
            self._links = {}

    # --- requests

    def send(self, request: Submit, before: Sent | None = None) -> bool:
        """Send a request to an engine. False if there is none, or it does not read its mailbox.

        `before`: its stay at another engine, which ends with the new one's begin.
        """
        scope, chunks = request.scope, []
        if self._several and not request.private:
            chunks = chunks_of(request.prompt.ids, scope)
        with self._lock:
            if before is not None:  # as it is now: a choice may have been finished, or the whole request abandoned
                onward = before.onward() if self.sent.get(request.id) is before else None
                if onward is None:
                    return False
                request = onward
            links = [link for link in self._links.values() if not link.failing]
            links = [link for link in links if not link.intake.full] or links
            if not links:
                return False
            link, hit = links[0], 0
            if self._several:
                link, hit = self._choose(request, links, chunks)
                self._note(link, chunks)
            left = max(0, len(request.prompt) + sum(map(len, request.produced.values())) - hit)
            self.sent[request.id] = Sent(request, Stay(link, left, self._lock), before)
            arrived = self._post(link, request)
            if arrived and self._shares:
                self._control.send(ToSupervisor(self._launch.name, Routed(link.engine, left, chunks)))
        if before is not None:
            before.stay.leave(whole=False)
        if not arrived:
            self.forget(request.id, whole=False)
        return arrived

    def move(self, sent: Sent) -> bool:
        """Send a request on to another engine, because its own one is gone or goes. False if none takes it; it is
        forgotten then."""
        sent.link.failing = True
        moved = self.send(sent.request, sent)
        if not moved:
            self.forget(sent.request.id, whole=False)
        return moved

    def finish(self, body: FinishChoice) -> None:
        """Tell the engine of a request that one of its choices is over."""
        with self._lock:
            sent = self.sent.get(body.id)
            if sent is not None:
                sent.end(body.choice)
                self._post_to(sent, body)

    def abandon(self, request: int) -> None:
        """A request is over, and its engine may still compute it."""
        with self._lock:
            sent = self.sent.pop(request, None)
            if sent is not None:
                self._post_to(sent, Abort(request))
        if sent is not None:
            sent.stay.leave(whole=False)

    def forget(self, request: int, *, whole: bool) -> None:
        """A request is over, or has left its engine. `whole`: it was answered to its end."""
        with self._lock:
            sent = self.sent.pop(request, None)
        if sent is not None:
            sent.stay.leave(whole=whole)

    def _choose(self, request: Submit, links: list[EngineLink], chunks: list[int]) -> tuple[EngineLink, int]:
        """The engine for a request, and the tokens of its prompt that are cached there."""
        hits = self._hits.found(chunks)
        candidates = [link.candidate(link.name, hits.get(link.name, 0)) for link in links]
        try:
            chosen = links[self._balancer.choose(arrival_of(request.prompt.ids, request.scope), candidates)]
        except BaseException as error:
            reraise_if_stopping(error)
            logger.exception("the balancer failed; the first engine with room gets the request")
            chosen = links[0]
        return chosen, hits.get(chosen.name, 0)

    def _note(self, link: EngineLink, chunks: list[int]) -> None:
        """An engine has got a prompt with these chunks."""
        self._hits.sent(link.name, chunks, self._kv_tokens)

    def _post_to(self, sent: Sent, body: Abort | FinishChoice) -> None:
        """Post to the engine of a request, if it is there."""
        if self._links.get(sent.link.engine) is sent.link:
            self._post(sent.link, body)

    def _post(self, link: EngineLink, body: Submit | Abort | FinishChoice | Hello | Heartbeat) -> bool:
        return link.outlet.send(ToEngine(self._launch.worker, body)) > 0
