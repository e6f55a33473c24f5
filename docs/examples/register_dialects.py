"""A dialect: `POST /complete {"text": "Once", "tokens": 8}` answers `{"text": ...}`. No thread waits for tokens."""

import msgspec
from llmcore.api import DialectSpec, SamplingParams, hookimpl
from llmcore.api.text import TextRules
from llmcore_server.api import Generation, Request, Route, intake


@hookimpl
def register_dialects():
    yield DialectSpec(name="complete", make=f"{__name__}:routes")


class Body(msgspec.Struct):
    """The body that clients send. A field of the wrong type or range is a 400 that names the field."""

    text: str
    tokens: int = 16


class Complete:
    """A Falcon resource."""

    def __init__(self, front):
        self.front = front

    def on_post(self, req, resp):
        """Check everything, then submit. The answer comes later, from the bridge's thread."""
        front, body = self.front, self.front.read(req, Body)
        prompt = intake.prompt_ids(front, body.text, param="text")
        room = intake.room(front, prompt, body.tokens, param="tokens", source="text")
        stop_ids = intake.eos_ids(front)
        submit = intake.submit(front, prompt, SamplingParams(temperature=0.0), max_new_tokens=room, stop_ids=stop_ids)
        rules = TextRules(stop_ids=frozenset(stop_ids))
        request = Request(submits=[submit], rules=rules, dialect="complete", request_id=front.request_id(req))
        generation = Generation(front, front.detach(req, resp), request)
        generation.start(Writer(generation.reply))


class Writer:
    """api.http.Writer. It collects the text and sends it when the choice has ended."""

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
    """Called once per HTTP worker."""
    yield Route("/complete", Complete(front), body=Body, queued=True)
