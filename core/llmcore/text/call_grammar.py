"""How a model's tool calls are written, as a grammar, which forces them and makes arguments fit their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]
"""Name -> function, as clients describe it."""


@dataclass(frozen=True, kw_only=True)
class CallGrammar:
    """In llguidance's Lark. `rules`: among others `one`, a call of one of the tools as it is written after the tag
    `opener`, and `many`, one or more; they may use `args_0`, ... of `argument_schemas` and the names of `tags`.

    `opener`: a name in `tags`, rule -> text of a tag. `bare`: an answer may begin with a call without it.
    """

    rules: str
    opener: str
    tags: Mapping[str, str] = field(default_factory=dict)
    bare: bool = False

    def forced(self, tools: Tools, *, single: bool) -> dict[str, Any]:
        """Arguments of `guided` for an answer that is calls of `tools`: one with `single`, else one or more."""
        opener = f"{self.opener}?" if self.bare else self.opener
        return self._whole(tools, f"start: {opener} {'one' if single else 'many'}")

    def free(self, tools: Tools, *, single: bool) -> dict[str, Any]:
        """Arguments of `guided` for text with or without calls; what begins as a call is one."""
        called = f"before_{self.opener} one" if single else f"(before_{self.opener} many)+"
        start = f"start: rest | {called}{'' if single else ' rest'}"
        if self.bare:
            start = f"start: {'one' if single else 'many'} | no_call (rest | {called}) | {self.opener} many |"
            start += "\nno_call: /[^{ \\t\\r\\n]/"
        return self._whole(tools, f"{start}\nrest: /(?s:.*)/")

    def _whole(self, tools: Tools, start: str) -> dict[str, Any]:
        return {
            "lark": "\n".join([start, self.rules]),
            "tags": dict(self.tags),
            "schemas": argument_schemas(tools),
        }


def argument_schemas(tools: Tools) -> dict[str, dict[str, Any]]:
    """`args_0`, `args_1`, ...: the arguments of each of `tools`, a JSON object that fits its `parameters`.

    A keyword that cannot be enforced is an error for a tool with `strict`; else it is left to the model. A schema
    travels as text: it may hold numbers that no message can.
    """
    return {
        f"args_{i}": {
            "schema": json.dumps({"type": "object", **(tool.get("parameters") or {})}),
            "strict": bool(tool.get("strict")),
            "of": f"the parameters of {name[:100]!r}",
        }
        for i, (name, tool) in enumerate(tools.items())
    }


def lark_string(text: str) -> str:
    """`text` as Lark quotes it."""
    return json.dumps(text, ensure_ascii=False)
