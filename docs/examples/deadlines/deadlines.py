"""A dialect whose clients say how soon they need an answer, and a scheduler that runs the most urgent one first."""

import math
import time

import msgspec
from llmcore.api import DialectSpec, SamplingParams, SchedulerSpec, hookimpl
from llmcore.api.sched import Share
from llmcore.api.text import TextRules
from llmcore_server.api import Generation, Request, Route, intake


@hookimpl
def register_schedulers():
    yield SchedulerSpec(name="deadlines", make=f"{__name__}:Deadlines")


@hookimpl
def register_dialects():
    yield DialectSpec(name="deadlines", make=f"{__name__}:routes")


def due(info):
    """The key that orders requests. Requests of other dialects have no hint and come last."""
    return info.hints.get("due", math.inf)


class Deadlines:
    """Answers go on. Of all prompts, running and waiting, the one that is due first is computed first."""

    def __init__(self, limits):
        self.paused = False

    def plan(self, view):
        share = Share(view, may_pause=not self.paused)
        for row in sorted(share.prompts(), key=lambda row: due(view.info(int(view.running[row])))):
            share.compute(row)
        for candidate in view.waiting(due) if view.admit and share.open else ():
            if not share.admit(candidate):
                break
        self.paused = share.paused
        return share.decision()


class Body(msgspec.Struct):
    """`POST /soon {"text": "Once", "within": 0.5}` asks for an answer that begins within half a second."""

    text: str
    within: float
    tokens: int = 16


class Soon:
    """A Falcon resource."""

    def __init__(self, front):
        self.front = front

    def on_post(self, req, resp):
        front, body = self.front, self.front.read(req, Body)
        prompt = intake.prompt_ids(front, body.text, param="text")
        submit = intake.submit(
            front,
            prompt,
            SamplingParams(temperature=0.0),
            max_new_tokens=intake.room(front, prompt, body.tokens, param="tokens", source="text"),
            hints={"due": time.monotonic() + body.within},
        )
        request = Request(submits=[submit], rules=TextRules(), dialect="deadlines", request_id=front.request_id(req))
        generation = Generation(front, front.detach(req, resp), request)
        generation.start(Writer(generation.reply))


class Writer:
    """api.http.Writer. It sends the text when the answer has ended."""

    def __init__(self, reply):
        self.reply = reply
        self.text = []

    def write(self, choice, event, texts):
        self.text += texts

    def done(self):
        self.reply.respond(200, msgspec.json.encode({"text": "".join(self.text)}), "application/json")

    def failed(self, error):
        self.reply.respond(error.status, msgspec.json.encode({"error": error.message}), "application/json")


def routes(front):
    yield Route("/soon", Soon(front), body=Body, queued=True)
