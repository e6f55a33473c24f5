"""A dialect for tests of processes: POST /echo with ids; answers whole, or as a stream of token ids."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import falcon
import msgspec
import orjson
from llmcore.api import ChoiceEvent, DialectSpec, Finish, Prompt, RequestRecord, Submit, hookimpl
from llmcore_server.api import Front, Reply, Route


class Body(msgspec.Struct):
    ids: list[int]
    n_tokens: int = 10
    stream: bool = False


class Writer:
    def __init__(self, front: Front, reply: Reply, body: Body, number: int, name: str) -> None:
        self.front, self.reply, self.body, self.number, self.name = front, reply, body, number, name
        self.tokens: list[int] = []

    def take(self, event: ChoiceEvent) -> None:
        self.tokens += event.tokens
        if event.error is not None:
            self.fail(event.error)
        elif self.body.stream:
            self.reply.stream(b"".join(b"data: %d\n\n" % token for token in event.tokens))
            if event.finish is not Finish.RUNNING:
                self.reply.end()
        elif event.finish is not Finish.RUNNING:
            self.reply.respond(200, orjson.dumps({"ids": self.tokens, "pid": os.getpid()}))
        if event.finish is not Finish.RUNNING:
            self.record(event.finish.name.lower())

    def fail(self, error: tuple[str, str]) -> None:
        if self.body.stream:
            self.reply.stream(b"data: error %b\n\n" % error[0].encode())
            self.reply.end()
        else:
            self.reply.respond(503, error[0].encode())

    def left(self) -> None:
        self.front.bridge.abort(self.number)
        self.record("abort")

    def record(self, finish: str) -> None:
        self.front.finished(
            RequestRecord(
                request_id=self.name,
                dialect="echo",
                prompt_tokens=len(self.body.ids),
                cached_tokens=0,
                output_tokens=len(self.tokens),
                max_new_tokens=self.body.n_tokens,
                finish=finish,
                first_token=0.01,
                duration=0.1,
            )
        )


class Echo:
    def __init__(self, front: Front) -> None:
        self.front = front

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = orjson.dumps({"pid": os.getpid()})

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        body = self.front.read(req, Body)
        reply = self.front.detach(req, resp)
        number = self.front.next_id()
        writer = Writer(self.front, reply, body, number, self.front.request_id(req))
        prompt = Prompt.of(body.ids)
        self.front.bridge.submit(Submit(id=number, prompt=prompt, max_new_tokens=body.n_tokens), writer.take)
        reply.on_close(writer.left)


class Modules:
    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = orjson.dumps(sorted(sys.modules))


class Crash:
    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        raise OSError("/etc/secret cannot be read")


def make(front: Front) -> Iterable[Route]:
    yield Route("/echo", Echo(front))
    yield Route("/crash", Crash())
    yield Route("/modules", Modules())


@hookimpl
def register_dialects() -> Iterable[DialectSpec]:
    yield DialectSpec(name="echo", make=f"{__name__}:make")
