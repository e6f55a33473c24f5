"""From a validated OpenAI request to what the engine and the text side need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
from llmcore.api import LogitsProcessor, SamplingParams, Submit
from llmcore.api.text import TextRules
from llmcore_server.api import BEAM_SEARCH, Front, intake, refusal, room_for_logprobs

from llmcore_openai.requests import PENALTIES, REFUSED, Sampled


class Cut(Protocol):
    """A request that may say which part of its prompt counts."""

    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None


def check(front: Front, body: Sampled) -> None:
    """Refuse what cannot be honoured: fields without a meaning here, contradictions, another model."""
    intake.refuse(body, REFUSED[type(body)])
    check_model(front, body.model)
    width = beams(body)
    if width == 1:
        intake.refuse(body, intake.NO_SEARCH, why="only a beam search has it, which use_beam_search asks for")
        if body.use_beam_search:
            raise refusal("use_beam_search", "num_beams (or best_of, or n) has to be 2 at least")
    check_stream(body)
    if body.stream and body.prompt_logprobs is not None:
        raise refusal("prompt_logprobs", "a stream has no place for them; leave stream out")
    if body.best_of is None:
        return
    if width > 1 and body.best_of not in (body.n or 1, width):
        raise refusal("best_of", f"a search with {width} beams finds so many answers; leave best_of out")
    if body.best_of < (body.n or 1):
        raise refusal("best_of", f"{body.best_of} answers are less than n, {body.n}")
    if body.stream and drawn(body) > (body.n or 1):
        raise refusal("best_of", "which answers are best is known at their end; leave stream out, or best_of")


_ANY_MODEL = ("dummy", "tgi")
"""Names that clients of text-generation-inference send for a server's only model; huggingface_hub sends the first."""


def check_model(front: Front, name: str | None) -> None:
    """Refuse another model's name."""
    if name in _ANY_MODEL and front.config.plugin_options.get("use_tgi_api"):
        return
    intake.check_model(front, name)


def check_stream(body: Sampled) -> None:
    """Refuse options of a stream that belong to no stream here, or that this server does not have."""
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise refusal("stream_options", "only a stream has them; set stream to true, or leave them out")
    if options.continuous_usage_stats and not options.include_usage:
        raise refusal("stream_options.continuous_usage_stats", "set include_usage as well")
    intake.refuse(options, {"include_obfuscation": (False,)}, prefix="stream_options.")


def beams(body: Sampled) -> int:
    """The number of beams that search for the answers; 1 without a search."""
    if body.num_beams is not None:
        return body.num_beams
    return max(body.best_of or 1, body.n or 1) if body.use_beam_search else 1


def drawn(body: Sampled) -> int:
    """The number of answers to generate for each prompt: more than `n` only for `best_of`."""
    return (body.n or 1) if beams(body) > 1 else max(body.n or 1, body.best_of or 1)


def sampling_params(front: Front, body: Sampled, logprobs: int | None) -> SamplingParams:
    """The parameters of the draws. The model's generation_config.json has those that the client leaves out."""
    allowed = tuple(body.allowed_token_ids or ())
    intake.check_ids(front, allowed, param="allowed_token_ids")
    sampling = SamplingParams(
        temperature=temperature(front, body),
        top_p=intake.or_model(front, body.top_p, "top_p", 1.0),
        top_k=max(0, int(intake.or_model(front, body.top_k, "top_k", 0))),
        min_p=intake.or_model(front, body.min_p, "min_p", 0.0),
        typical_p=intake.or_model(front, body.typical_p, "typical_p", 1.0),
        repetition_penalty=intake.or_model(front, body.repetition_penalty, "repetition_penalty", 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=intake.logit_bias(front, body.logit_bias or {}),
        logprobs=logprobs,
        seed=intake.seed(body.seed),
        allowed_ids=allowed,
        logits_processors=tuple(LogitsProcessor(given.name, given.args) for given in body.logits_processors or ()),
    )
    return intake.without_words(front, sampling, body.bad_words)


def prompt_ids(
    front: Front, prompt: str | Sequence[int], body: Cut, *, param: str, special: bool, most: int | None
) -> Sequence[int]:
    """A prompt's tokens: those that `body` says, of which -1 are as many as leave room for `most`."""
    keep = body.truncate_prompt_tokens
    if keep is not None:
        longest = front.facts.max_input_len
        if keep == 0 or keep > longest:
            raise refusal("truncate_prompt_tokens", f"it is -1 or 1 to {longest}, the longest prompt")
        if keep == -1:
            keep = max(1, min(longest, front.facts.max_total_len - (most or 1)))
    return intake.prompt_ids(
        front,
        prompt,
        param=param,
        add_special_tokens=special,
        max_new_tokens=most,
        keep=keep,
        side=body.truncation_side or intake.LEFT,
    )


def text_rules(front: Front, body: Sampled) -> TextRules:
    """The rules that end an answer, and that decide which of its text is shown."""
    stops, special = intake.split_stops(front, intake.as_list(body.stop))
    named = body.stop_token_ids or ()
    intake.check_ids(front, named, param="stop_token_ids")
    return TextRules(
        stops=stops,
        stop_ids=frozenset((*(() if body.ignore_eos else intake.eos_ids(front)), *named, *special)),
        keep_stop=bool(body.include_stop_str_in_output),
        keep_stop_id=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        space_special_tokens=bool(body.spaces_between_special_tokens),
        min_tokens=least(body)[1],
    )


def temperature(front: Front, body: Sampled) -> float:
    """The request's, else the model's own; `do_sample` says whether anything is drawn at all."""
    if body.do_sample is False:
        return 0.0
    chosen = intake.or_model(front, body.temperature, "temperature", 1.0)
    if body.do_sample and body.temperature is None and chosen == 0.0:
        return 1.0  # the model's own is greedy, and the request asks for more
    return chosen


def least(body: Sampled) -> tuple[str, int]:
    """The field that gives the fewest tokens of an answer, by vLLM's name or LMDeploy's, and its value."""
    if body.min_tokens is None and body.min_new_tokens is not None:
        return "min_new_tokens", body.min_new_tokens
    if body.min_new_tokens not in (None, body.min_tokens):
        raise refusal("min_new_tokens", f"min_tokens says {body.min_tokens}; give one of them")
    return "min_tokens", body.min_tokens or 0


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
    """One Submit per prompt. `logprobs`: how many of the best tokens are shown beside each, None: no log-probabilities
    are. `limit`: the field that bounds the answer, and its value. `source`: see intake.room."""
    name, asked = limit
    least_name, fewest = least(body)
    intake.check_least(fewest, asked, param=least_name, limit=name)
    intake.check_allowed(
        body.allowed_token_ids or (), rules.stop_ids, fewest=fewest, param="allowed_token_ids", least=least_name
    )
    shown = logprobs
    if drawn(body) > (body.n or 1) and logprobs is None:
        logprobs = 0  # by which answers are compared
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
        if shown is not None:
            named = (name, asked) if asked is not None else (least_name, fewest)
            left = _room_for_logprobs(body, left, named, prompts=len(prompts), each=1 + shown)
        made.append(
            intake.submit(
                front,
                prompt,
                sampling,
                max_new_tokens=left,
                min_new_tokens=min(fewest, left),
                stop_ids=sorted(rules.stop_ids),
                n=drawn(body),
                cache_salt=intake.salt(body.cache_salt),
                beams=search,
                priority=body.priority,
            )
        )
    return made


def _room_for_logprobs(body: Sampled, left: int, named: tuple[str, int], *, prompts: int, each: int) -> int:
    """The most tokens that an answer may have if `each` log-probabilities are shown per token. `named`: the field that
    says how many tokens there will be, and its value."""
    param, asked = named
    width = beams(body)
    if width > 1:
        choices = max(width, drawn(body)) if each > 1 else drawn(body)
        left = room_for_logprobs(left, asked, choices=choices, each=each, param=param, limit=BEAM_SEARCH)
    if not body.stream:
        left = room_for_logprobs(left, asked, choices=prompts * drawn(body), each=each, param=param)
    return left


def with_prompt_logprobs(made: Sequence[Submit], *tops: int | None) -> Sequence[Submit]:
    """The same, with log-probabilities of the prompts where one of `tops` says how many beside each token."""
    wanted = [top for top in tops if top is not None]
    if not wanted:
        return made
    return [msgspec.structs.replace(one, prompt_logprobs=True, prompt_top=max(wanted)) for one in made]
