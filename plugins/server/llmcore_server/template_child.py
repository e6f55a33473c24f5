"""`python -m llmcore_server.template_child`: renders a model's chat template for `templates`, within limits.

The process loads neither numpy nor a tokenizer, so it is small and starts fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from llmcore.api.child_pool import serve
from llmcore.api.errors import ConfigError, RequestError
from llmcore.text.templates import ChatTemplate


class Question(msgspec.Struct):
    """Asks for the prompt of a conversation. Without messages, it asks whether the template can be served."""

    messages: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}


class Answer(msgspec.Struct, omit_defaults=True):
    """The prompt, or the variables that the template reads, or the template's error.

    `error`, `param`, `code`: those of a RequestError, or the text of a ConfigError.
    """

    prompt: str = ""
    variables: tuple[str, ...] = ()
    error: str | None = None
    param: str | None = None
    code: str | None = None


def begin(opening: bytearray) -> Callable[[bytearray], bytes]:
    """See `child_pool.serve`. `opening`: a ChatTemplate as JSON."""
    template = msgspec.json.decode(opening, type=ChatTemplate)
    # msgpack has no integers of more than 64 bits. Tools may have some.
    questions = msgspec.json.Decoder(Question)

    def answer_to(question: bytearray) -> bytes:
        return msgspec.json.encode(_answer(template, questions.decode(question)))

    return answer_to


def _answer(template: ChatTemplate, question: Question) -> Answer:
    try:
        if question.messages is not None:
            return Answer(prompt=template.render(question.messages, **question.variables))
        template.check()
        return Answer(variables=tuple(template.variables))
    except RequestError as error:
        return Answer(error=error.message, param=error.param, code=error.code)
    except ConfigError as error:
        return Answer(error=str(error))


if __name__ == "__main__":
    serve(begin)
