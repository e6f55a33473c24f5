"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import orjson

from llmcore.api import RequestError
from llmcore.api.http import FINISH_REASONS, Choice, Front, Generation, Job, fitting, intake
from llmcore.api.text import Event
from llmcore.builtin.openai import sampling
from llmcore.builtin.openai.guide import guide
from llmcore.builtin.openai.logprobs import TokenNames, completion_entries
from llmcore.builtin.openai.requests import CompletionRequest
from llmcore.builtin.openai.writers import Shown, StreamWriter, WholeWriter


class CompletionShape:
    """How completions show a choice. `echo`: the prompts' texts where they come before the answers."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"
    closing = b'"text":""'

    def __init__(self, front: Front, echo: Sequence[str] | None):
        self._names = TokenNames(front.tokenizer, "bytes:")
        self._echo = echo

    def opening(self, choice: Choice) -> bytes | None:
        """The prompt, where it was asked for."""
        return None if self._echo is None else b'"text":%b' % orjson.dumps(self._echo[choice.prompt])

    def pieces(self, choice: Choice, text: str) -> Sequence[bytes]:
        """A piece of the answer."""
        return (b'"text":%b' % orjson.dumps(text),) if text else ()

    def logprobs(self, choice: Choice, shown: Shown) -> Any:
        """Columns over tokens."""
        return completion_entries(self._names, shown)

    def whole(self, choice: Choice, text: str, events: Sequence[Event]) -> dict[str, Any]:
        """The answer."""
        return {"text": text if self._echo is None else self._echo[choice.prompt] + text}

    def finish_reason(self, choice: Choice) -> str:
        """As the engine or a stop says."""
        return FINISH_REASONS[choice.text.finish]


class Completions:
    """The resource."""

    def __init__(self, front: Front):
        self._front = front

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Validate everything, then submit; the answer comes from the bridge's thread."""
        body = self._front.read(req, CompletionRequest)
        given = split_prompts(body.prompt)
        job = self._job(body, given, self._front.request_id(req))
        shape = CompletionShape(self._front, [self._text(prompt) for prompt in given] if body.echo else None)
        generation = Generation(self._front, self._front.detach(req, resp), job)
        logprobs = body.logprobs is not None
        if body.stream:
            generation.start(
                StreamWriter(self._front, generation, shape, logprobs=logprobs, options=body.stream_options)
            )
        else:
            generation.start(WholeWriter(self._front, generation, shape, logprobs=logprobs))

    def _job(self, body: CompletionRequest, given: list[str] | list[list[int]], request_id: str) -> Job:
        sampling.check(self._front, body)
        if body.echo and body.logprobs is not None:
            raise RequestError(
                "logprobs: with echo they would include the prompt's, which this server does not compute; "
                "leave one of the two out",
                param="logprobs",
                code="unsupported_parameter",
            )
        intake.check_choices(len(given), body.n or 1, param="prompt")
        rules = sampling.text_rules(self._front, body)
        special = body.add_special_tokens is not False
        prompts = [
            intake.prompt_ids(
                self._front,
                prompt,
                param="prompt",
                add_special_tokens=special,
                max_new_tokens=body.max_tokens,
            )
            for prompt in given
        ]
        submits = sampling.submits(
            self._front,
            body,
            prompts,
            rules,
            logprobs=body.logprobs,
            limit=("max_tokens", body.max_tokens),
            source="prompt",
        )
        submits = fitting(submits, guide(self._front, body))
        return Job(submits=submits, rules=rules, dialect="openai", request_id=request_id)

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._front.tokenizer.decode(prompt)


def split_prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """The prompts of a request: one text, texts, one list of ids, or lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    for kind in (str, list):
        if all(isinstance(item, kind) for item in prompt):
            return prompt
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    raise RequestError(
        "prompt: a list holds only texts, only token ids, or only lists of token ids",
        param="prompt",
        code="invalid_type",
    )
