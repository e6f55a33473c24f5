"""A dialect under test, without a server: its routes on a bridge that answers from a script.

side = Side.of(routes, tokenizer, answer="Hello")
assert side.ok("/generate", inputs="hi", parameters={})["generated_text"] == ["Hello"]

The parts of a `Side` can be used alone:

bridge = FakeBridge(lambda prompt, choice: tokenizer.encode("Hello"))
client = dialect_client(routes, fake_front(bridge, tokenizer))
client.simulate_post("/generate", json={...}).json
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import falcon
import falcon.testing
import numpy as np
import orjson
from llmcore.api.bridge import ChoiceEvent, Finish, Load, ModelFacts, Sink, Submit
from llmcore.api.errors import RequestError
from llmcore.api.protocols import RequestRecord, Tokenizer
from llmcore.api.specs import OutputParserSpec
from llmcore.config import Config, Model
from llmcore_server.chat.request_parsing import OutputParsers, open_parser
from llmcore_server.http.app import build_app
from llmcore_server.http.front import Front, Route
from llmcore_server.http.reply import Reply
from llmcore_server.messages import State

Answer = Callable[[Sequence[int], int], Sequence[int]]
"""(prompt, choice) -> the ids that the choice would get if nothing stopped it."""


def echo(prompt: Sequence[int], choice: int) -> Sequence[int]:
    """The prompt, over and over."""
    return list(prompt) * 1000


@dataclass
class FakeBridge:
    """A bridge that answers from a script.

    Token i of an answer has the log-probability -(i + 1) / 8, and `top` lists the ids just below its own. Token i of a
    prompt has -(i + 1) / 4, and the ids just below its own as the best ones.
    """

    answer: Answer = echo
    wait: bool = False
    """Send one event per `step`. Otherwise a request runs to its end when it is submitted."""
    group: int = 1
    """Tokens per event."""
    error: tuple[str, str] | None = None
    """(code, message) that ends each choice after `error_after` tokens."""
    error_after: int = 0
    refuse: RequestError | None = None
    """`submit` raises it."""
    scores: tuple[float, ...] = (0.5,)
    """The answer to a request for a score."""
    state: Callable[[Sequence[int]], Sequence[float]] = lambda ids: (ids[0], ids[-1], len(ids))
    """The hidden state of a prompt's ids."""
    submitted: list[Submit] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    finished: list[tuple[int, int, int]] = field(default_factory=list)
    _open: dict[tuple[int, int], _Script] = field(default_factory=dict)

    def submit(self, request: Submit, sink: Sink) -> None:
        """Bridge."""
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append(request)
        for choice in range(request.n):
            prompt = request.prompt.ids.tolist()
            self._open[request.id, choice] = _Script(request, sink, choice, self.answer(prompt, choice))
        while self._open and not self.wait:
            self.step()

    def abort(self, request_id: int) -> None:
        """Bridge."""
        self.aborted.append(request_id)
        for key in [key for key in self._open if key[0] == request_id]:
            del self._open[key]

    def finish(self, request_id: int, choice: int, n_tokens: int) -> None:
        """Bridge."""
        self.finished.append((request_id, choice, n_tokens))
        self._open.pop((request_id, choice), None)

    def load(self) -> Load:
        """Bridge."""
        return Load(running=len(self._open), kv_live=25, kv_free=75, kv_total=100, peak=50)

    def step(self) -> None:
        """Send one event for every choice that runs."""
        for key, script in list(self._open.items()):
            if key not in self._open:
                continue
            if self.error is not None and script.done >= self.error_after:
                event = ChoiceEvent(choice=script.choice, tokens=(), finish=Finish.ERROR, error=self.error)
            else:
                event = self._event(script)
            if event.finish is not Finish.RUNNING:
                del self._open[key]
            script.sink(event)

    def _event(self, script: _Script) -> ChoiceEvent:
        request = script.request
        if request.pool:
            state = np.array(self.state(request.prompt.ids.tolist()), "<f4")
            return ChoiceEvent(choice=script.choice, tokens=(), finish=Finish.STOP, pooled=state.tobytes())
        return script.scored(self.scores) if request.score else script.next(self.group)


@dataclass
class _Script:
    """One choice and its answer."""

    request: Submit
    sink: Sink
    choice: int
    ids: Sequence[int]
    done: int = 0

    def next(self, most: int) -> ChoiceEvent:
        """The next tokens, up to `most`."""
        tokens: list[int] = []
        finish = Finish.RUNNING
        first = self.done
        while len(tokens) < most and finish is Finish.RUNNING:
            tokens.append(self.ids[self.done])
            self.done += 1
            if tokens[-1] in self.request.stop_ids and self.done > self.request.min_new_tokens:
                finish = Finish.STOP
            elif self.done >= min(self.request.max_new_tokens, len(self.ids)):
                finish = Finish.LENGTH
        wanted = self.request.sampling.logprobs
        logprobs = tuple(-(first + i + 1) / 8 for i in range(len(tokens)))
        best = tuple(tuple((token - 1 - j, -1.0 - j) for j in range(wanted or 0)) for token in tokens)
        known = self._prompt_logprobs() if first == 0 else ()
        return ChoiceEvent(
            choice=self.choice,
            tokens=tuple(tokens),
            finish=finish,
            logprobs=() if wanted is None else logprobs,
            top=best if wanted else (),
            cached=0 if first == 0 else -1,
            prompt_logprobs=known,
            prompt_ranks=tuple(range(1, 1 + len(known))),
            prompt_top=self._prompt_top() if first == 0 else (),
        )

    def scored(self, scores: tuple[float, ...]) -> ChoiceEvent:
        """The one event of a score."""
        return ChoiceEvent(choice=self.choice, tokens=(), finish=Finish.STOP, scores=scores)

    def _prompt_logprobs(self) -> tuple[float, ...]:
        if not self.request.prompt_logprobs or self.choice:
            return ()
        return tuple(-(i + 1) / 4 for i in range(1, len(self.request.prompt)))

    def _prompt_top(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        if not self.request.prompt_top or self.choice:
            return ()
        ids = self.request.prompt.ids.tolist()[1:]
        return tuple(tuple((token - 1 - j, -1.0 - j) for j in range(self.request.prompt_top)) for token in ids)


@dataclass
class FakeTransport:
    """Collects the parts of a reply in Falcon's response, while the responder still runs."""

    response: falcon.Response
    sent: bytes = b""
    ended: bool = False
    status: int = 200
    stream_type: str = "text/event-stream"

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Transport."""
        self.response.set_headers(dict(headers))

    def send_part(self, data: bytes) -> None:
        """Transport."""
        self.sent += data
        self.response.content_type = self.stream_type
        self.response.data = self.sent

    def send_probe(self) -> None:
        """Transport: this client does not leave."""

    def send_end(self) -> None:
        """Transport."""
        self.ended = True

    def send_break(self) -> None:
        """Transport."""
        self.ended = True

    def send_whole(self, status: int, body: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        """Transport."""
        self.sent, self.ended, self.status = body, True, status
        self.response.status = falcon.code_to_http_status(status)
        self.response.content_type = content_type
        self.response.set_headers(dict(headers))
        self.response.data = body

    def send_pieces(self, pieces: Iterator[bytes], content_type: str, headers: Mapping[str, str]) -> None:
        """Transport."""
        self.send_whole(200, b"".join(pieces), content_type, headers)


@dataclass(frozen=True, kw_only=True)
class FakeFront(Front):
    """A front that keeps all its replies, transports and records."""

    replies: list[Reply] = field(default_factory=list)
    transports: list[FakeTransport] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)

    def detach(self, req: falcon.Request, resp: falcon.Response) -> Reply:
        """Answer into `resp` at once."""
        self.transports.append(FakeTransport(resp))
        self.replies.append(Reply(self.transports[-1]))
        self.replies[-1].attach()
        return self.replies[-1]

    def finished(self, record: RequestRecord) -> None:
        """Keep the record."""
        self.records.append(record)


def fake_front(
    bridge: FakeBridge,
    tokenizer: Tokenizer,
    *,
    model_name: str | None = "fake",
    parsers: Iterable[OutputParserSpec] = (),
    processors: Iterable[str] = (),
    config: Config | None = None,
    **facts: Any,
) -> FakeFront:
    """A front on `bridge`.

    `parsers`: at most one of each kind. `processors`: names of logits processors. `config`: its settings, apart from
    the model's. `facts`: fields of bridge.ModelFacts that replace a small model's.
    """
    known = {
        "architecture": "Fake",
        "vocab_size": tokenizer.vocab_size,
        "max_input_len": 200,
        "max_total_len": 256,
        "kv_tokens": 1000,
        "max_running": 10,
        "eos_ids": tokenizer.eos_ids,
    }
    active = {spec.kind: open_parser(spec, tokenizer) for spec in parsers}
    return FakeFront(
        config=replace(
            config or Config(),
            model=Model(model_dir="models/some-model", model_name=(model_name,) if model_name else ()),
        ),
        bridge=bridge,
        tokenizer=tokenizer,
        facts=ModelFacts(**{**known, **facts}),
        state=lambda: State(ready=True),
        parsers=OutputParsers(tool=active.get("tool"), reasoning=active.get("reasoning")),
        processors=frozenset(processors),
    )


def dialect_client(routes: Callable[[Front], Iterable[Route]], front: Front) -> falcon.testing.TestClient:
    """A client of an application with only this dialect's routes, and with the errors that clients see."""
    return falcon.testing.TestClient(build_app((route, "test") for route in routes(front)))


@dataclass
class Side:
    """A client of one dialect, with its bridge and front."""

    client: falcon.testing.TestClient
    bridge: FakeBridge
    front: FakeFront

    @classmethod
    def of(
        cls,
        routes: Callable[[Front], Iterable[Route]],
        tokenizer: Tokenizer,
        answer: str | list[int] | None = None,
        facts: dict[str, Any] | None = None,
        parsers: Iterable[OutputParserSpec] = (),
        **bridge: Any,
    ) -> Side:
        """A side on which every choice answers with `answer`, or repeats its prompt if that is None.

        `fake_front` describes `facts` and `parsers`.
        """
        if answer is not None:
            ids = tokenizer.encode(answer) if isinstance(answer, str) else answer
            bridge["answer"] = lambda prompt, choice: ids
        fake = FakeBridge(**bridge)
        front = fake_front(fake, tokenizer, parsers=parsers, **(facts or {}))
        return cls(dialect_client(routes, front), fake, front)

    def post(self, path: str, **body: Any) -> falcon.testing.Result:
        """POST a JSON object."""
        return self.client.simulate_post(path, json=body)

    def ok(self, path: str, **body: Any) -> Any:
        """The JSON answer of a POST that must succeed."""
        result = self.post(path, **body)
        assert result.status_code == 200, result.text
        return result.json

    def events(self, path: str, prefix: str = "data: ", **body: Any) -> list[Any]:
        """The events of a stream, which must have ended. "[DONE]" stays text."""
        result = self.post(path, **body)
        assert result.headers["content-type"] == "text/event-stream", result.text
        assert self.front.transports[-1].ended
        *events, rest = result.text.split("\n\n")
        assert rest == ""
        assert all(event.startswith(prefix) for event in events)
        texts = [event.removeprefix(prefix) for event in events]
        return [text if text == "[DONE]" else orjson.loads(text) for text in texts]

    def lines(self, path: str, **body: Any) -> list[Any]:
        """The objects of a stream of JSON lines, which must have ended."""
        result = self.post(path, **body)
        assert result.headers["content-type"] == "application/x-ndjson", result.text
        assert self.front.transports[-1].ended
        return [orjson.loads(line) for line in result.text.splitlines()]
