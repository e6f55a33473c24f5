"""The grammar of a model's tool calls. It can force calls, and makes their arguments fit the schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]
"""Name -> function, as the client describes it."""


@dataclass(frozen=True, kw_only=True)
class CallGrammar:
    """A grammar of tool calls in llguidance's Lark."""

    rules: str
    """Lark rules. Rule `one` is one call of a tool, as the model writes it after the tag `opener`; rule `many` is one
    or more calls. Rules may use `args_0`, ... of `argument_schemas` and the names in `tags`."""
    opener: str
    """The name in `tags` of the tag that begins calls."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Rule name -> text of a tag."""
    bare: bool = False
    """True if an answer may begin with a call without the opener."""

    def forced(self, tools: Tools, *, single: bool) -> dict[str, Any]:
        """Arguments of `guided` for an answer that consists of calls of `tools`: one if `single`, else one or more."""
        opener = f"{self.opener}?" if self.bare else self.opener
        return self._whole(tools, f"start: {opener} {'one' if single else 'many'}")

    def free(self, tools: Tools, *, single: bool) -> dict[str, Any]:
        """Arguments of `guided` for text with or without calls. Text that begins like a call must be a valid call."""
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
    """`args_0`, `args_1`, ... -> the schema of each tool's arguments: a JSON object that fits its `parameters`.

    A keyword that the grammar cannot enforce is an error for a tool with `strict`, else the grammar ignores it. A
    schema is sent as text, because it may contain numbers that messages between processes cannot hold.
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
    """`text` as a quoted Lark string."""
    return json.dumps(text, ensure_ascii=False)
