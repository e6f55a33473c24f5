"""The routes of text-generation-inference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import version

import falcon
import msgspec
from llmcore.api import SamplingParams, Submit
from llmcore.api.text import TextRules
from llmcore_server.api import (
    Front,
    Generation,
    Request,
    Route,
    fitting,
    intake,
    refusal,
    room_for_logprobs,
    typed,
)
from llmcore_server.settings import Server

from llmcore_tgi import answers
from llmcore_tgi.requests import MAX_BEST_OF, MAX_STOPS, REFUSED, GenerateRequest, Parameters
from llmcore_tgi.writers import Shape, StreamWriter, WholeWriter, encode_error


def routes(front: Front) -> Iterable[Route]:
    """One resource per path; none at all without `--use_tgi_api`."""
    if not front.config.plugin_options.get("use_tgi_api"):
        return
    route = partial(Route, encode_error=encode_error, failure=answers.ErrorAnswer)
    generate = partial(route, body=GenerateRequest, queued=True)
    whole, event = answers.GenerateAnswer, answers.TokenEvent
    yield generate("/generate", Generate(front, stream=False), answer=whole)
    yield generate("/generate_stream", Generate(front, stream=True), event=event)
    yield generate("/", Generate(front, stream=None), answer=list[answers.GenerateAnswer], event=event)
    yield route("/info", Info(front), answer=answers.InfoAnswer)


class Generate:
    """/generate, /generate_stream, and / where the body's `stream` (None here) says which."""

    def __init__(self, front: Front, *, stream: bool | None):
        self._front = front
        self._stream = stream

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Validate everything, then submit; the answer comes from the bridge's thread."""
        front = self._front
        body = front.read(req, GenerateRequest)
        given = body.parameters or Parameters()
        stream = bool(body.stream) if self._stream is None else self._stream
        check(given, stream)
        prompt = prompt_ids(front, body.inputs, given)
        submit, rules = make_submit(front, prompt, given, stream)
        shape = Shape(
            tokenizer=front.tokenizer,
            eos_ids=frozenset(intake.eos_ids(front)),
            prompt=prompt,
            prefix=body.inputs if given.return_full_text else "",
            details=bool(given.details or given.decoder_input_details),
            prefill=bool(given.decoder_input_details),
            seed=submit.sampling.seed if given.sampled else None,
            top=given.top_n_tokens or 0,
            # / answers with a list of one, /generate with an object
            listed=self._stream is None,
        )
        guide = None if given.grammar is None else typed("parameters.grammar", given.grammar).processor(front)
        submits = fitting([submit], guide)
        request = Request(submits=submits, rules=rules, dialect="tgi", request_id=front.request_id(req), stream=stream)
        generation = Generation(front, front.detach(req, resp), request)
        generation.start(StreamWriter(generation, shape) if stream else WholeWriter(generation, shape))


class Info:
    """/info: the model and the limits of requests."""

    def __init__(self, front: Front):
        facts = front.facts
        self._front = front
        self._answer = {
            "model_id": front.model_name,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": facts.max_running,
            "max_best_of": MAX_BEST_OF,
            "max_stop_sequences": MAX_STOPS,
            "max_input_tokens": facts.max_input_len,
            "max_total_tokens": facts.max_total_len,
            "validation_workers": front.config.section(Server).httpserver_workers,
            "max_client_batch_size": 1,
            "router": "llmcore",
            "version": version("llmcore-engine"),
            "sha": None,
            "docker_label": None,
        }

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Answer."""
        self._front.answer(resp, self._answer)


def check(given: Parameters, stream: bool) -> None:
    """Refuse parameters that contradict each other."""
    intake.refuse(given, REFUSED, prefix="parameters.")
    best_of = given.best_of or 1
    if best_of > 1 and not given.sampled:
        raise refusal("parameters.best_of", "several answers differ only if they are sampled; set do_sample")
    if best_of > 1 and given.seed not in (None, intake.NO_SEED):
        raise refusal("parameters.best_of", "the answers are drawn from several seeds; leave seed out")
    intake.check_one_answer(best_of, stream=stream, param="parameters.best_of")
    if given.decoder_input_details and stream:
        raise refusal("parameters.decoder_input_details", "a stream does not carry the prompt's tokens; use /generate")


def prompt_ids(front: Front, text: str, given: Parameters) -> Sequence[int]:
    """The prompt's tokens; `truncate` is the number of those that stay."""
    if given.truncate is not None and given.truncate > front.facts.max_input_len:
        raise refusal(
            "parameters.truncate", f"{given.truncate} is more than the longest prompt, {front.facts.max_input_len}"
        )
    return intake.prompt_ids(
        front,
        text,
        param="inputs",
        max_new_tokens=given.max_new_tokens,
        keep=given.truncate,
        side=given.truncation_side or intake.LEFT,
    )


def make_submit(front: Front, prompt: Sequence[int], given: Parameters, stream: bool) -> tuple[Submit, TextRules]:
    """The request to the engine, and the rules by which its tokens become text."""
    name = "parameters.max_new_tokens"
    left = intake.room(front, prompt, given.max_new_tokens, param=name, source="inputs")
    stops, special = intake.split_stops(front, given.stop or [])
    rules = TextRules(stops=stops, stop_ids=frozenset((*intake.eos_ids(front), *special)), keep_stop=True)
    n = given.best_of or 1
    top = given.top_n_tokens or 0
    if (given.details or given.decoder_input_details) and not stream:
        left = room_for_logprobs(left, given.max_new_tokens, choices=n, each=1 + top, param=name)
    shown = stream or given.details or given.decoder_input_details or n > 1
    sampling = SamplingParams(
        temperature=(given.temperature or 1.0) if given.sampled else 0.0,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=given.top_k or 0,
        typical_p=1.0 if given.typical_p is None else given.typical_p,
        repetition_penalty=1.0 if given.repetition_penalty is None else given.repetition_penalty,
        frequency_penalty=given.frequency_penalty or 0.0,
        # "the text so far" is the prompt too
        penalize_prompt=True,
        logprobs=top if shown else None,
        seed=intake.seed(given.seed),
    )
    submit = intake.submit(
        front,
        prompt,
        sampling,
        max_new_tokens=left,
        stop_ids=sorted(rules.stop_ids),
        n=n,
    )
    if given.decoder_input_details:
        submit = msgspec.structs.replace(submit, prompt_logprobs=True)
    return submit, rules
