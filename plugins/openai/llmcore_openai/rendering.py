"""Conversations as OpenAI's clients write them, and as chat templates read them."""

from __future__ import annotations

from typing import Any

import msgspec
from llmcore.api import RequestError
from llmcore_server.api import Conversation, Front, check_variables

from llmcore_openai.calls import choice_of
from llmcore_openai.requests import ChatRequest, Message, Part
from llmcore_openai.tools import offered_tools

_MARKS = ("prefix", "partial")
"""Members of a message that make the answer go on with it: makers of models say it in either word."""

_MAY_BE_EMPTY = frozenset({"assistant", "function"})


def variables_of(front: Front, body: ChatRequest) -> dict[str, Any]:
    """The template's variables that a request sets. Raises RequestError."""
    variables = dict(body.chat_template_kwargs or {})
    check_variables(variables, param="chat_template_kwargs")
    template = getattr(front.tokenizer, "template", None)  # tokenizers of plugins may have none
    known = None if template is None else template.variables
    if body.enable_thinking is not None:  # LMDeploy's; what a template does not know is off
        if body.enable_thinking and known is not None and "enable_thinking" not in known:
            raise _refusal("enable_thinking", "this model's chat template does not know it; leave it out")
        variables.setdefault("enable_thinking", body.enable_thinking)
    for name in ("reasoning_effort", "verbosity"):  # hints: a model without such a measure has its own
        value = getattr(body, name)
        if value is not None and (known is None or name in known):
            variables.setdefault(name, value)
        elif name == "reasoning_effort" and value not in (None, "medium") and "enable_thinking" in (known or ()):
            variables.setdefault("enable_thinking", value not in ("none", "minimal"))
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    asked = continuing(body)
    if asked:
        if variables.get("add_generation_prompt"):
            raise _contradiction(asked, "an answer continues a message or begins one; leave add_generation_prompt out")
        variables["add_generation_prompt"] = False
    return variables


def continuing(body: ChatRequest) -> str:
    """The field that makes the answer go on with the last message; "" where it is to be a new one. Raises RequestError
    for fields that contradict each other, and for a message that is not at the end."""
    last = len(body.messages) - 1
    said = {"continue_final_message": body.continue_final_message}
    for i, message in enumerate(body.messages):
        marks = {f"messages[{i}].{name}": getattr(message, name) for name in _MARKS}
        asked = next((path for path, value in marks.items() if value), "")
        if asked and (i != last or message.role != "assistant"):
            raise _contradiction(
                asked, "only the last message, one of the assistant, can be the beginning of the answer"
            )
        said |= marks if i == last else {}
    asked = next((path for path, value in said.items() if value), "")
    against = next((path for path, value in said.items() if value is False), "") if asked else ""
    if against:
        raise _contradiction(against, f"{asked} says that the answer goes on with the last message; leave one out")
    return asked


def conversation_of(front: Front, body: ChatRequest) -> Conversation:
    """The conversation of a request. Raises RequestError."""
    return Conversation(
        variables=variables_of(front, body),
        tools=offered_tools(body),
        choice=choice_of(body),
        messages=[as_template_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)],
        continues=continuing(body),
    )


def _contradiction(name: str, why: str) -> RequestError:
    return RequestError(f"{name}: {why}", param=name, code="invalid_value")


def _refusal(name: str, why: str) -> RequestError:
    return RequestError(f"{name}: {why}", param=name, code="unsupported_parameter")


def as_template_message(message: Message, path: str) -> dict[str, Any]:
    """A message as chat templates read it: content as one text, absent members left out."""
    members: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message.content, list):
        members["content"] = "\n".join(
            _text_of(part, f"{path}.content[{i}]") for i, part in enumerate(message.content)
        )
    elif message.content is None:
        if message.role not in _MAY_BE_EMPTY:
            raise RequestError(
                f"{path}.content: a {message.role} message needs content",
                param=f"{path}.content",
                code="missing_required_parameter",
            )
        members["content"] = message.refusal  # templates have no word for it
    for name in _MARKS:
        members.pop(name, None)  # `continuing` has read it
    reasoning = members.pop("reasoning", None)
    if reasoning is not None:
        # The name that templates know; some servers and clients have only the shorter one.
        members.setdefault("reasoning_content", reasoning)
    return members


def _text_of(part: Part, path: str) -> str:
    if part.type != "text":
        raise RequestError(
            f"{path}: content of type {part.type[:50]!r} is not supported; this server takes text",
            param=path,
            code="unsupported",
        )
    if part.text is None:
        raise RequestError(
            f"{path}.text: this field is required", param=f"{path}.text", code="missing_required_parameter"
        )
    return part.text
