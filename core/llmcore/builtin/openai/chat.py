"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import falcon
import msgspec
import orjson

from llmcore.api import Finish, RequestError
from llmcore.api.http import FINISH_REASONS, Choice, Front, Generation, Job, fitting, intake
from llmcore.api.text import RESERVED_TEMPLATE_VARIABLES, Event, ParserContext, RequestParsing
from llmcore.builtin.openai import sampling
from llmcore.builtin.openai.calls import chat_guide, choice_of
from llmcore.builtin.openai.logprobs import TokenNames, chat_entries
from llmcore.builtin.openai.requests import ChatRequest, Message, Part
from llmcore.builtin.openai.tools import (
    check_shown,
    deltas,
    message_members,
    offered_tools,
    refuse_functions,
    with_short_ids,
)
from llmcore.builtin.openai.writers import Shown, StreamWriter, WholeWriter

_MAY_BE_EMPTY = frozenset({"assistant", "function"})


class ChatShape:
    """How chat completions show a choice."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    closing = b'"delta":{}'

    def __init__(self, front: Front):
        self._names = TokenNames(front.tokenizer)

    def opening(self, choice: Choice) -> bytes:
        """The role, once."""
        return b'"delta":{"role":"assistant","content":""}'

    def pieces(self, choice: Choice, text: str) -> Sequence[bytes]:
        """Pieces of the message."""
        if choice.events is not None:
            return deltas(choice.events)
        return (b'"delta":{"content":%b}' % orjson.dumps(text),) if text else ()

    def logprobs(self, choice: Choice, shown: Shown) -> Any:
        """One entry per token."""
        return {"content": chat_entries(self._names, shown), "refusal": None}

    def whole(self, choice: Choice, text: str, events: Sequence[Event]) -> dict[str, Any]:
        """The message."""
        members = {"content": text} if choice.events is None else message_members(events)
        return {"message": {"role": "assistant", **members, "refusal": None}}

    def finish_reason(self, choice: Choice) -> str:
        """A limit of tokens counts more than a call, which it may have cut."""
        if choice.calls and choice.text.finish is Finish.STOP:
            return "tool_calls"
        return FINISH_REASONS[choice.text.finish]


class ChatCompletions:
    """The resource."""

    def __init__(self, front: Front):
        self._front = front
        self._shape = ChatShape(front)

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Validate everything, then submit; the answer comes from the bridge's thread."""
        body = self._front.read(req, ChatRequest)
        job, logprobs = self._job(body, self._front.request_id(req))
        generation = Generation(self._front, self._front.detach(req, resp), job)
        if body.stream:
            generation.start(
                StreamWriter(self._front, generation, self._shape, logprobs=logprobs, options=body.stream_options)
            )
        else:
            generation.start(WholeWriter(self._front, generation, self._shape, logprobs=logprobs))

    def _job(self, body: ChatRequest, request_id: str) -> tuple[Job, bool]:
        refuse_functions(body)
        sampling.check(self._front, body)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError(
                "top_logprobs: set logprobs to true as well", param="top_logprobs", code="invalid_value"
            )
        best = (body.top_logprobs or 0) if body.logprobs else None
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        tools = offered_tools(self._front, body)
        prompt = self._prompt(body, tools)
        check_shown(tools, prompt)
        parsing = self._parsing(body, tools, prompt)
        rules = sampling.text_rules(self._front, body)
        if parsing is not None:
            rules = replace(rules, keep_special_ids=parsing.special_ids)
        submits = sampling.submits(
            self._front,
            body,
            [self._ids(body, prompt)],
            rules,
            logprobs=best,
            limit=(name, getattr(body, name)),
            source="messages",
        )
        job = Job(
            submits=fitting(submits, chat_guide(self._front, body, tools, prompt)),
            rules=rules,
            dialect="openai",
            request_id=request_id,
            parsing=parsing,
            single_call=body.parallel_tool_calls is False,
        )
        return job, best is not None

    def _parsing(self, body: ChatRequest, tools: Sequence[Mapping[str, Any]], prompt: str) -> RequestParsing | None:
        """How the answers are parsed."""
        context = ParserContext(
            tools={tool["function"]["name"]: tool["function"] for tool in tools},
            tool_choice=choice_of(body).mode,
            template_variables=body.chat_template_kwargs or {},
            prompt=prompt,
        )
        return self._front.parsers.bind(context)

    def _ids(self, body: ChatRequest, prompt: str) -> Sequence[int]:
        """The ids of the rendered conversation. The template writes the special tokens itself."""
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return intake.prompt_ids(
            self._front,
            prompt,
            param="messages",
            add_special_tokens=bool(body.add_special_tokens),
            max_new_tokens=asked,
        )

    def _prompt(self, body: ChatRequest, tools: Sequence[Mapping[str, Any]]) -> str:
        """The rendered conversation."""
        variables = dict(body.chat_template_kwargs or {})
        reserved = RESERVED_TEMPLATE_VARIABLES & variables.keys()
        if reserved:
            param = f"chat_template_kwargs.{min(reserved)}"
            raise RequestError(f"{param}: a request cannot set it", param=param, code="unsupported_parameter")
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        if body.add_generation_prompt is not None:
            variables["add_generation_prompt"] = body.add_generation_prompt
        if tools:
            variables["tools"] = tools
        messages = [as_template_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
        parser = self._front.parsers.tool
        if parser is not None and parser.spec.call_id_size is not None:
            messages = [with_short_ids(message, parser.spec.call_id_size) for message in messages]
        return self._front.tokenizer.chat(messages, **variables)


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
        members["content"] = None
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
            code="unsupported_parameter",
        )
    if part.text is None:
        raise RequestError(
            f"{path}.text: this field is required", param=f"{path}.text", code="missing_required_parameter"
        )
    return part.text
