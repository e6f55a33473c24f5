"""A conversation through the model's chat template."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcore.api.errors import RequestError
from llmcore.text.parsing import ParserContext
from llmcore.text.templates import RESERVED

from llmcore_server.chat.tools import ToolChoice, check_tools, with_short_ids
from llmcore_server.http.front import Front


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a request says of a conversation, as chat templates read it.

    `messages`: objects with `role` and `content`, a text; an assistant's may have `reasoning_content` and
    `tool_calls`, a tool's `tool_call_id`. `tools`: objects with `type` "function" and `function`, whose members are
    `name`, `description` and `parameters`; all that the model gets to see. `choice`: which of them it may call.
    `variables`: the template's own. `continues`: the client's field that makes the answer go on with the last
    message; "" where the answer is a new message.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = field(default_factory=lambda: ToolChoice("auto"))
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: str = ""

    def prompt(self, front: Front) -> str:
        """The prompt that shows the messages and the tools. Raises RequestError."""
        try:
            prompt = self._render(front)
        except RequestError:
            if front.parsers.tool is None:
                check_tools(front.parsers, self.tools, None)
            raise
        check_tools(front.parsers, self.tools, prompt)
        return prompt

    def context(self, prompt: str) -> ParserContext:
        """What the parsers of the answers to `prompt` may know."""
        return ParserContext(
            tools={tool["function"]["name"]: tool["function"] for tool in self.tools},
            tool_choice=self.choice.mode,
            template_variables=self.variables,
            prompt=prompt,
            continued=(self.messages[-1].get("content") or "") if self.continues else "",
        )

    def _render(self, front: Front) -> str:
        messages, parser = self.messages, front.parsers.tool
        if parser is not None and parser.spec.call_id_size is not None:
            messages = [with_short_ids(message, parser.spec.call_id_size) for message in messages]
        given = {**self.variables, "tools": self.tools} if self.tools else self.variables
        if not self.continues:
            return front.tokenizer.chat(messages, **given)
        last = messages[-1]
        if last.get("tool_calls"):
            raise self._refusal(
                "the last message has tool_calls, which are complete; write a begun one as content", "invalid_value"
            )
        if not last.get("content"):
            raise self._refusal("the last message has no content to continue", "invalid_value")
        # Templates trim messages and add to them; whatever follows the mark is theirs and not the message's.
        mark = uuid.uuid4().hex
        rendered = front.tokenizer.chat([*messages[:-1], {**last, "content": last["content"] + mark}], **given)
        prompt, found, _ = rendered.rpartition(mark)
        if not found:
            why = "the model's chat template does not show the last message as it is"
            raise self._refusal(why, "unsupported_parameter")
        return prompt

    def _refusal(self, why: str, code: str) -> RequestError:
        return RequestError(f"{self.continues}: {why}", param=self.continues, code=code)


def check_variables(names: Iterable[str], *, param: str) -> None:
    """Refuse variables of a chat template that a client may not set. `param`: the field that has them."""
    for name in names:
        if name in RESERVED:
            path, why, code = f"{param}.{name}", "a request cannot set it", "unsupported_parameter"
        elif not name.isidentifier():
            path, code = f"{param}.{name[:50]}", "invalid_value"
            why = "a chat template cannot read a variable of this name; use letters and _"
        else:
            continue
        raise RequestError(f"{path}: {why}", param=path, code=code)
