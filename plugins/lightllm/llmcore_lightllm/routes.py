"""The routes of LightLLM's native dialect."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import falcon
import msgspec
from llmcore.api import ConfigError, LengthDecay, LogitsProcessor, RequestError, SamplingParams
from llmcore.api.text import TextRules
from llmcore_server.api import (
    BEAM_SEARCH,
    Front,
    Generation,
    Request,
    Route,
    fitting,
    guided,
    intake,
    refusal,
    room_for_logprobs,
    typed,
)

from llmcore_lightllm import answers
from llmcore_lightllm.requests import (
    PENALTIES,
    REFUSED,
    GenerateRequest,
    Parameters,
    ScoreRequest,
    TokensRequest,
)
from llmcore_lightllm.writers import ScoreWriter, StreamWriter, WholeWriter, encode_error


def routes(front: Front) -> Iterable[Route]:
    """One resource per path. With `--use_tgi_api` the paths that TGI has too are its dialect's."""
    route = partial(Route, encode_error=encode_error, failure=answers.ErrorAnswer)
    generate = partial(route, body=GenerateRequest, queued=True)
    whole, event = answers.GenerateAnswer, answers.TokenEvent
    if front.config.plugin_options.get("use_reward_model") and not front.facts.scores:
        raise ConfigError("--use_reward_model: this model has no head that scores; leave the option out")
    if not front.config.plugin_options.get("use_tgi_api"):
        yield generate("/generate", Generate(front, stream=False), answer=whole)
        yield generate("/generate_stream", Generate(front, stream=True), event=event)
        yield generate("/", Generate(front, stream=None), answer=whole, event=event)
    yield route("/get_score", Score(front), body=ScoreRequest, queued=True, answer=answers.ScoreAnswer)
    yield route("/tokens", Tokens(front), body=TokensRequest, answer=answers.TokensAnswer)
    yield route("/token_load", TokenLoad(front), answer=answers.LoadAnswer)
    yield route("/get_model_name", ModelName(front), answer=answers.NameAnswer)


class Generate:
    """/generate, /generate_stream, and / where the body's `stream` (None here) says which."""

    def __init__(self, front: Front, *, stream: bool | None):
        self._front = front
        self._stream = stream
        self._beam_mode = bool(front.config.plugin_options.get("beam_mode"))
        self._prompt_logprobs = bool(front.config.plugin_options.get("return_all_prompt_logprobs"))

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Validate everything, then submit; the answer comes from the bridge's thread."""
        body = self._front.read(req, GenerateRequest)
        stream = bool(body.stream) if self._stream is None else self._stream
        request = self._request(body, stream, self._front.request_id(req))
        generation = Generation(self._front, self._front.detach(req, resp), request)
        if stream:
            generation.start(StreamWriter(generation, self._front.tokenizer))
        else:
            details = bool(body.parameters.return_details)
            generation.start(WholeWriter(generation, self._front.tokenizer, details=details))

    def _request(self, body: GenerateRequest, stream: bool, request_id: str) -> Request:
        given = body.parameters
        intake.refuse(given, REFUSED, prefix="parameters.")
        refuse_media(body.multimodal_params)
        width = beams(given, beam_mode=self._beam_mode)
        n = check_copies(given, stream, width)
        asked = given.max_new_tokens or 16
        prompt = intake.prompt_ids(
            self._front,
            body.inputs,
            param="inputs",
            add_special_tokens=given.add_special_tokens is not False,
            max_new_tokens=asked,
        )
        name = "parameters.max_new_tokens"
        left = intake.room(self._front, prompt, asked, param=name, source="inputs")
        least = "parameters.min_new_tokens"
        intake.check_least(given.min_new_tokens or 1, left, param=least, limit="max_new_tokens")
        if given.return_details and not stream:
            left = room_for_logprobs(left, given.max_new_tokens, choices=n, each=1, param=name)
        rules = text_rules(self._front, given)
        sampling, search = sampling_params(self._front, given, logprobs=stream or bool(given.return_details)), None
        if width > 1:
            search = intake.beam_search(given, width, PENALTIES, prefix="parameters.")
            sampling = SamplingParams(temperature=0.0, logprobs=sampling.logprobs, seed=sampling.seed)
            if sampling.logprobs is not None:
                most = given.max_new_tokens
                left = room_for_logprobs(left, most, choices=n, each=1, param=name, limit=BEAM_SEARCH)
        # LightLLM lets the last of the least tokens be the end token; the bridge counts those before it.
        fewest = (given.min_new_tokens or 1) - 1
        submit = intake.submit(
            self._front,
            prompt,
            sampling,
            max_new_tokens=left,
            min_new_tokens=fewest,
            stop_ids=sorted(rules.stop_ids),
            n=n,
            beams=search,
            priority=given.priority,
        )
        intake.check_allowed(
            given.allowed_token_ids or (),
            submit.stop_ids,
            fewest=fewest,
            param="parameters.allowed_token_ids",
            least="min_new_tokens",
        )
        if self._prompt_logprobs and not stream:
            submit = msgspec.structs.replace(submit, prompt_logprobs=True)
        submits = fitting([submit], guide(self._front, given))
        return Request(submits=submits, rules=rules, dialect="lightllm", request_id=request_id, stream=stream)


class Score:
    """/get_score: a reward model's score of a prompt."""

    def __init__(self, front: Front):
        self._front = front

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Validate, then submit."""
        if not self._front.facts.scores:
            raise RequestError(
                "This model has no head that scores; a server of a reward model answers /get_score.",
                code="unsupported_parameter",
            )
        body = self._front.read(req, ScoreRequest)
        refuse_media(body.multimodal_params)
        prompt = intake.prompt_ids(self._front, body.chat, param="chat")
        intake.room(self._front, prompt, 1, param="chat", source="chat")
        submit = intake.submit(self._front, prompt, SamplingParams(), max_new_tokens=1)
        request = Request(
            submits=[msgspec.structs.replace(submit, score=True)],
            rules=TextRules(),
            dialect="lightllm",
            request_id=self._front.request_id(req),
        )
        generation = Generation(self._front, self._front.detach(req, resp), request)
        generation.start(ScoreWriter(generation))


class Tokens:
    """/tokens: how many tokens a text has."""

    def __init__(self, front: Front):
        self._front = front

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Count."""
        body = self._front.read(req, TokensRequest)
        refuse_media(body.multimodal_params)
        special = body.parameters is None or body.parameters.add_special_tokens is not False
        ids = intake.encode(self._front, body.text, param="text", add_special_tokens=special)
        self._front.answer(resp, {"ntokens": len(ids)})

    on_get = on_post


class TokenLoad:
    """/token_load: shares of the KV slots."""

    def __init__(self, front: Front):
        self._front = front

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """In use now, and at the peak that is foreseen (under both of LightLLM's names)."""
        load = self._front.bridge.load()
        total = max(1, load.kv_total)
        peak = load.peak / total
        self._front.answer(
            resp, {"current_load": load.kv_live / total, "logical_max_load": peak, "dynamic_max_load": peak}
        )


class ModelName:
    """/get_model_name."""

    def __init__(self, front: Front):
        self._front = front
        self._name = next(iter(front.config.model.model_name), "default_model_name")

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """The name that was given to the server."""
        self._front.answer(resp, {"model_name": self._name})

    on_post = on_get


def beams(given: Parameters, *, beam_mode: bool) -> int:
    """The number of beams that search for the answers; 1 without a search. With --beam_mode it is `best_of`."""
    if given.num_beams is not None:
        return given.num_beams
    return (given.best_of or given.n or 1) if beam_mode else 1


def sampling_params(front: Front, given: Parameters, *, logprobs: bool) -> SamplingParams:
    """The parameters of the draws: greedy unless `do_sample`. Penalties see the prompt only with `input_penalty`."""
    temperature = 1.0 if given.temperature is None else given.temperature
    if given.top_k == 0:
        raise refusal("parameters.top_k", "0 is not a count; use -1 for no limit")
    allowed = tuple(given.allowed_token_ids or ())
    intake.check_ids(front, allowed, param="parameters.allowed_token_ids")
    start, factor = given.exponential_decay_length_penalty or (1, 1.0)
    return SamplingParams(
        temperature=temperature if given.do_sample else 0.0,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=max(0, given.top_k or 0),
        min_p=given.min_p or 0.0,
        typical_p=1.0 if given.typical_p is None else given.typical_p,
        repetition_penalty=1.0 if given.repetition_penalty is None else given.repetition_penalty,
        presence_penalty=given.presence_penalty or 0.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        repetition_over_prompt=bool(given.input_penalty),
        penalize_prompt=bool(given.input_penalty),
        logprobs=0 if logprobs else None,
        seed=intake.seed(given.seed),
        allowed_ids=allowed,
        length_decay=LengthDecay(start, factor, intake.eos_ids(front)) if factor > 1 else None,
    )


def text_rules(front: Front, given: Parameters) -> TextRules:
    """The rules that end an answer. Stop texts stay in it, the end token's text does not, unless `print_eos_token`."""
    sequences = given.stop_sequences or []
    if isinstance(sequences, str):
        sequences = [sequences]
    texts = [stop for stop in sequences if isinstance(stop, str)]
    stops, special = intake.split_stops(front, texts)
    return TextRules(
        stops=stops,
        stop_tokens=tuple(tuple(stop) for stop in sequences if not isinstance(stop, str)),
        stop_ids=frozenset((*(() if given.ignore_eos else intake.eos_ids(front)), *special)),
        keep_stop=True,
        keep_stop_id=bool(given.print_eos_token),
        skip_special_tokens=given.skip_special_tokens is not False,
        space_special_tokens=given.add_spaces_between_special_tokens is not False,
        min_tokens=given.min_new_tokens or 1,
    )


def check_copies(given: Parameters, stream: bool, width: int) -> int:
    """n, which equals best_of unless that is the number of beams; a stream carries one answer."""
    if width == 1:
        why = "only a beam search has it, which num_beams asks for"
        intake.refuse(given, intake.NO_SEARCH, prefix="parameters.", why=why)
    n = given.n or (1 if (given.num_beams or 1) > 1 else given.best_of) or 1
    if given.best_of not in (None, n, width if width > 1 else n):
        raise refusal(
            "parameters.best_of",
            "every answer that is generated is returned, so best_of must equal n"
            + (", or the number of beams" if width > 1 else ""),
            "unsupported_parameter",
        )
    intake.check_one_answer(n, stream=stream, param="parameters.n" if given.n else "parameters.best_of")
    return n


_CONSTRAINTS = {"regular_constraint": "regex", "guided_grammar": "grammar", "guided_json": "json"}
"""LightLLM's fields that constrain an answer -> the argument of `guided` that does it."""


def guide(front: Front, given: Parameters) -> LogitsProcessor | None:
    """The processor that enforces the constraint of `given`, or None if there is none.

    As with LightLLM there is one at most; `grammar` is TGI's, which huggingface_hub sends. Raises RequestError for
    several.
    """
    asked = [name for name in (*_CONSTRAINTS, "grammar", "allowed_token_ids") if getattr(given, name)]
    if not set(asked) - {"allowed_token_ids"}:
        return None
    if len(asked) > 1:
        raise refusal(f"parameters.{asked[1]}", f"it cannot be combined with {asked[0]}")
    if given.grammar is not None:
        return typed("parameters.grammar", given.grammar).processor(front)
    kind, value = _CONSTRAINTS[asked[0]], getattr(given, asked[0])
    if value == "json" and kind == "grammar":  # the name of a grammar that LightLLM brings: any JSON
        kind, value = "json", True
    return guided(front, f"parameters.{asked[0]}", **{kind: value})


def refuse_media(given: dict[str, Any] | None) -> None:
    """Images and audio would change the answer."""
    for name, items in (given or {}).items():
        if items:
            raise refusal(f"multimodal_params.{name[:50]}", "this server takes text only", "unsupported")
