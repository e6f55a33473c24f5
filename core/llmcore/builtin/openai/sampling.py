"""From a validated OpenAI request to what the engine and the text side need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmcore.api import LogitsProcessor, RequestError, SamplingParams, Submit
from llmcore.api.http import Front, intake
from llmcore.api.text import TextRules
from llmcore.builtin.openai.requests import PENALTIES, REFUSED, Sampled


def check(front: Front, body: Sampled) -> None:
    """Refuse what cannot be honoured: fields without a meaning here, contradictions, another model."""
    intake.refuse(body, REFUSED[type(body)])
    if body.model and body.model not in front.model_names:
        raise RequestError(
            f"The model `{body.model[:100]}` does not exist; this server has `{front.model_name}`.",
            param="model",
            code="model_not_found",
            status=404,
        )
    width = beams(body)
    if width == 1:
        intake.refuse(body, intake.NO_SEARCH, why="only a beam search has it, which use_beam_search asks for")
        if body.use_beam_search:
            raise RequestError(
                "use_beam_search: num_beams (or best_of, or n) has to be 2 at least",
                param="use_beam_search",
                code="invalid_value",
            )
    if body.best_of is not None and body.best_of != (body.n or 1) and body.best_of != width:
        raise RequestError(
            "best_of: this server returns every choice it generates, so best_of must equal n",
            param="best_of",
            code="unsupported_parameter",
        )


def beams(body: Sampled) -> int:
    """How many beams search for the answers; 1: there is no search."""
    if body.num_beams is not None:
        return body.num_beams
    return max(body.best_of or 1, body.n or 1) if body.use_beam_search else 1


def sampling_params(front: Front, body: Sampled, logprobs: int | None) -> SamplingParams:
    """How tokens are drawn; what the client leaves open comes from the model's generation_config.json."""
    model = front.facts.generation
    return SamplingParams(
        temperature=_default(body.temperature, model, "temperature", 1.0),
        top_p=_default(body.top_p, model, "top_p", 1.0),
        top_k=max(0, int(_default(body.top_k, model, "top_k", 0))),
        min_p=_default(body.min_p, model, "min_p", 0.0),
        repetition_penalty=_default(body.repetition_penalty, model, "repetition_penalty", 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=intake.logit_bias(front, body.logit_bias or {}),
        logprobs=logprobs,
        seed=intake.draw_seed() if body.seed is None else body.seed,
        logits_processors=tuple(LogitsProcessor(given.name, given.args) for given in body.logits_processors or ()),
    )


def text_rules(front: Front, body: Sampled) -> TextRules:
    """What ends an answer, and what of it is shown."""
    stops, special = intake.split_stops(front, intake.as_list(body.stop))
    named = body.stop_token_ids or ()
    intake.check_ids(front, named, param="stop_token_ids")
    return TextRules(
        stops=stops,
        stop_ids=frozenset((*(() if body.ignore_eos else intake.eos_ids(front)), *named, *special)),
        keep_stop=bool(body.include_stop_str_in_output),
        keep_stop_id=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )


def submits(
    front: Front,
    body: Sampled,
    prompts: Sequence[Sequence[int]],
    rules: TextRules,
    *,
    logprobs: int | None,
    limit: tuple[str, int | None],
    source: str,
) -> list[Submit]:
    """One Submit per prompt. `limit`: the field that bounds the answer, and its value. `source`: see intake.room."""
    name, asked = limit
    if asked is not None and (body.min_tokens or 0) > asked:
        raise RequestError(
            f"min_tokens: {body.min_tokens} is more than {name}, {asked}", param="min_tokens", code="invalid_value"
        )
    sampling, search = sampling_params(front, body, logprobs), None
    if beams(body) > 1:
        search = intake.beam_search(body, beams(body), PENALTIES)
        # the model's own defaults for draws have no part in a search either
        sampling = SamplingParams(
            temperature=0.0, logprobs=logprobs, seed=sampling.seed, logits_processors=sampling.logits_processors
        )
    made = []
    for prompt in prompts:
        left = intake.room(front, prompt, asked, param=name, source=source)
        made.append(
            intake.submit(
                front,
                prompt,
                sampling,
                max_new_tokens=left,
                min_new_tokens=min(body.min_tokens or 0, left),
                stop_ids=sorted(rules.stop_ids),
                n=body.n or 1,
                cache_salt=intake.salt(body.cache_salt),
                beams=search,
            )
        )
    return made


def _default(given: float | None, model: Mapping[str, Any], name: str, fallback: float) -> float:
    if given is not None:
        return given
    value = model.get(name)
    return float(value) if isinstance(value, int | float) else fallback
