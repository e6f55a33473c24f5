"""Guided decoding as dialects ask for it: a logits processor called `guided`, which a plugin brings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from llmcore.bridge import LogitsProcessor, Submit
from llmcore.errors import RequestError
from llmcore.http.front import Front

NAME = "guided"
"""The processor that takes what `guided` passes on."""


def guided(front: Front, param: str, **args: Any) -> LogitsProcessor:
    """The processor that makes answers fit; `param`: the client's field. None among `args` is left out.

    One of `json` (a JSON schema or its text), `json_object` (True), `regex`, `grammar` (Lark or GBNF), `choice`
    (texts) and `lark` (a parser's own, with `tags`) says what fits; the engine checks it before the request is
    queued. Raises RequestError where no plugin brings such a processor.
    """
    if NAME not in front.processors:
        raise RequestError(
            f"{param}: this server has no guided decoding; it comes with pip install plugin-guided",
            param=param,
            code="unsupported_parameter",
        )
    return LogitsProcessor(NAME, {name: _carried(name, a) for name, a in args.items() if a is not None}, param)


def fitting(submits: Sequence[Submit], processor: LogitsProcessor | None) -> list[Submit]:
    """The same, with answers that `processor` makes fit; None changes nothing. Raises RequestError for beams."""
    if processor is None:
        return list(submits)
    if any(submit.beams is not None for submit in submits):
        raise RequestError(
            f"{processor.param}: a beam search cannot be guided; leave one of the two out",
            param=processor.param,
            code="unsupported_parameter",
        )
    return [_with(submit, processor) for submit in submits]


def _with(submit: Submit, processor: LogitsProcessor) -> Submit:
    sampling = submit.sampling
    processors = (*sampling.logits_processors, processor)
    return msgspec.structs.replace(submit, sampling=msgspec.structs.replace(sampling, logits_processors=processors))


def _carried(name: str, value: Any) -> Any:
    """A schema travels as text: it may hold numbers that no message can."""
    return value if name != "json" or isinstance(value, str) else json.dumps(value)
