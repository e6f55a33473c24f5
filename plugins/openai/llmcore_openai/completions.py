"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import falcon
import orjson
from llmcore.api import ChoiceEvent, RequestError, Submit
from llmcore.api.text import Event
from llmcore_server.api import (
    FINISH_REASONS,
    Choice,
    Front,
    Generation,
    Place,
    Request,
    TokenNames,
    filled,
    fitting,
    intake,
)

from llmcore_openai import sampling
from llmcore_openai.guide import guide
from llmcore_openai.logprobs import Columns, completion_columns, joined
from llmcore_openai.prompt_logprobs import PromptLogprobs, check_most
from llmcore_openai.prompts import Echoes, Prompt, split_prompts
from llmcore_openai.requests import CompletionRequest
from llmcore_openai.writers import StreamWriter, whole_writer


class CompletionShape:
    """The form of a choice of completions. `names`: of tokens. `echoes`: the prompts, if they come before the answers.
    `known`: their log-probabilities, if these come beside the answers."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"
    closing = b'"text":""'
    prompts = True

    def __init__(
        self, names: TokenNames, echoes: Echoes | None, known: PromptLogprobs | None, *, answers: bool = True
    ):
        self._names = names
        self._echoes = echoes
        self._prompts = known
        self.answers = answers
        # Who reads log-probabilities of prompts finds where they end by counting the answer's.
        self.every_token = echoes is not None

    def hear(self, choice: Choice, event: ChoiceEvent) -> None:
        """The prompt's log-probabilities."""
        if self._echoes is not None:
            self._echoes.hear(choice.prompt, event)
        if self._prompts is not None:
            self._prompts.hear(choice.prompt, event)

    def opening(self, choice: Choice) -> bytes | None:
        """The prompt, where it was asked for."""
        return None if self._echoes is None else b'"text":%b' % orjson.dumps(self._echoes.texts[choice.prompt])

    def pieces(self, choice: Choice, text: str) -> Sequence[bytes]:
        """A piece of the answer."""
        return (b'"text":%b' % orjson.dumps(text),) if text and self.answers else ()

    def opened(self, choice: Choice) -> Columns | None:
        """The prompt's columns."""
        return None if self._echoes is None else self._echoes.columns(self._names, choice.prompt)

    def logprobs(self, choice: Choice, places: Iterable[Place]) -> Columns:
        """Columns over tokens."""
        begin = 0 if self._echoes is None else len(self._echoes.texts[choice.prompt])
        return completion_columns(self._names, places, begin=begin)

    def all_logprobs(self, choice: Choice, places: Iterable[Place]) -> Columns:
        """Those of the prompt first, where it is shown."""
        mine = self.logprobs(choice, places)
        first = self.opened(choice)
        return mine if first is None else joined(first, mine)

    def whole(self, choice: Choice, text: str, events: Sequence[Event]) -> dict[str, Any]:
        """The answer."""
        shown = text if self.answers else ""
        before = "" if self._echoes is None else self._echoes.texts[choice.prompt]
        return {"text": before + shown, **({} if self._prompts is None else self._prompts.of(choice.prompt))}

    def beside(self) -> dict[str, Any]:
        """Every choice says all itself: there may be several prompts."""
        return {}

    def finish_reason(self, choice: Choice) -> str:
        """As the engine or a stop says."""
        return FINISH_REASONS[choice.text.finish] if self.answers else "length"


class Completions:
    """The resource."""

    def __init__(self, front: Front):
        self._front = front

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Validate everything, then submit; the answer comes from the bridge's thread."""
        front = self._front
        body = front.read(req, CompletionRequest)
        check(front, body)
        given = split_prompts(front, body.prompt)
        intake.check_choices(len(given), sampling.drawn(body), param="prompt")
        prompts = [self._ids(body, prompt) for prompt in given]
        request = self._request(body, prompts, front.request_id(req))
        special = body.skip_special_tokens is False
        echoes = Echoes(front, given, prompts, body.logprobs, special=special) if body.echo else None
        known = None
        if body.prompt_logprobs is not None:
            known = PromptLogprobs(front.tokenizer, prompts, body.prompt_logprobs)
        names = TokenNames(front.tokenizer, "bytes:", ids=bool(body.return_tokens_as_token_ids))
        shape = CompletionShape(names, echoes, known, answers=body.max_tokens != 0)
        generation = Generation(front, front.detach(req, resp), request)
        wanted = {"logprobs": body.logprobs is not None, "ids": bool(body.return_token_ids)}
        if body.stream:
            generation.start(StreamWriter(front, generation, shape, options=body.stream_options, **wanted))
        else:
            generation.start(whole_writer(front, generation, shape, n=body.n or 1, **wanted))

    def _ids(self, body: CompletionRequest, prompt: Prompt) -> Sequence[int]:
        """The tokens of one prompt."""
        return sampling.prompt_ids(
            self._front,
            filled(self._front, prompt, body.suffix) if body.suffix else prompt,
            body,
            param="prompt",
            special=body.add_special_tokens is not False,
            most=body.max_tokens,
        )

    def _request(self, body: CompletionRequest, prompts: Sequence[Sequence[int]], request_id: str) -> Request:
        rules = sampling.text_rules(self._front, body)
        made: Sequence[Submit] = sampling.submits(
            self._front,
            body,
            prompts,
            rules,
            logprobs=body.logprobs,
            # The engine needs a token to end with; nobody will see it.
            limit=("max_tokens", 1 if body.max_tokens == 0 else body.max_tokens),
            source="prompt",
        )
        tops = body.logprobs if body.echo else None, body.prompt_logprobs
        made = sampling.with_prompt_logprobs(made, *tops)
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        check_most(prompts, tops, body.n or 1, param=param)
        submits = fitting(made, guide(self._front, body))
        return Request(submits=submits, rules=rules, dialect="openai", request_id=request_id, stream=bool(body.stream))


def check(front: Front, body: CompletionRequest) -> None:
    """Refuse what cannot be honoured."""
    sampling.check(front, body)
    if body.max_tokens == 0 and not body.echo:
        raise _refusal("max_tokens", "0 asks for the prompt alone, so set echo to true; else it is 1 or more")
    name, fewest = sampling.least(body)
    if body.max_tokens == 0 and fewest:
        raise _refusal(name, f"{fewest} is more than max_tokens, 0")
    if body.max_tokens == 0 and body.return_token_ids:
        raise _refusal("return_token_ids", "there is no answer to list tokens of; /tokenize lists a prompt's")
    if body.echo and body.truncate_prompt_tokens is not None:
        raise _refusal("echo", "it shows the whole prompt; leave truncate_prompt_tokens out")
    if body.echo and body.suffix and body.logprobs is not None:
        raise _refusal("logprobs", "with echo they would tell of the tokens around suffix; leave one of the three out")


def _refusal(name: str, why: str) -> RequestError:
    return RequestError(f"{name}: {why}", param=name, code="invalid_value")
