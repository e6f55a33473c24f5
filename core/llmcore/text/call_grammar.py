"""How a model's tool calls are written, as a grammar, which forces them and makes arguments fit their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CallGrammar:
    """In llguidance's Lark. `rules`: among others `one`, a call of one of the tools as it is written after the tag
    `opener`, and `many`, one or more; they may use `args_0`, ... of `argument_rules` and the names of `tags`.

    `opener`: a name in `tags`, rule -> text of a tag. `bare`: an answer may begin with a call without it.
    """

    rules: str
    opener: str
    tags: Mapping[str, str] = field(default_factory=dict)
    bare: bool = False

    def forced(self, tools: Mapping[str, Mapping[str, Any]], *, single: bool) -> str:
        """An answer that is calls: one with `single`, else one or more."""
        opener = f"{self.opener}?" if self.bare else self.opener
        return self._whole(tools, f"start: {opener} {'one' if single else 'many'}")

    def free(self, tools: Mapping[str, Mapping[str, Any]], *, single: bool) -> str:
        """Text, with or without calls; what begins as a call is one."""
        called = f"before_{self.opener} one" if single else f"(before_{self.opener} many)+"
        start = f"start: rest | {called}{'' if single else ' rest'}"
        if self.bare:
            start = f"start: {'one' if single else 'many'} | no_call (rest | {called}) | {self.opener} many |"
            start += "\nno_call: /[^{ \\t\\r\\n]/"
        return self._whole(tools, f"{start}\nrest: /(?s:.*)/")

    def _whole(self, tools: Mapping[str, Mapping[str, Any]], start: str) -> str:
        return "\n".join([start, self.rules, argument_rules(tools)])


def argument_rules(tools: Mapping[str, Mapping[str, Any]]) -> str:
    """`args_0`, `args_1`, ...: the arguments of each of `tools`, a JSON object that fits its `parameters`.

    What a schema says that cannot be enforced is an error for a tool with `strict`; else it is left to the model.
    """
    return "\n".join(f"args_{i}: %json {_schema(tool)}" for i, tool in enumerate(tools.values()))


def _schema(tool: Mapping[str, Any]) -> str:
    schema = {"type": "object", **(tool.get("parameters") or {})}
    return json.dumps(schema if tool.get("strict") else {**schema, "x-guidance": {"lenient": True}})


def lark_string(text: str) -> str:
    """`text` as Lark quotes it."""
    return json.dumps(text, ensure_ascii=False)
