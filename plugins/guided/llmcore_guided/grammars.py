"""A request's arguments as grammars of llguidance (its JSON form), checked as far as that needs no compiler."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

MOST_CHARACTERS = {"json": 512 << 10, "regex": 16 << 10, "grammar": 64 << 10, "choice": 64 << 10, "lark": 512 << 10}
"""By argument: longer ones are refused. It bounds what compiling can cost, in stack above all."""

TagRule = Callable[[str], str | None]
"""A tag's text -> the number of the special token that it is, as Lark writes it; None where it is ordinary text."""

_KINDS = ("json", "json_object", "regex", "grammar", "choice", "lark")
_OPTIONS = frozenset({"lenient", "whitespace", "whitespace_pattern", "thought", "tags", "calls"})
_RULE = re.compile(r"[a-z][a-z0-9_]*")
_OPTIONS_OF_LLGUIDANCE = '%llguidance {"no_forcing": true}'
"""Where the next bytes are known the model still chooses how to cut them: its tokenizer may add a space to a text."""

_SPACE = r"/[ \t\r\n]{0,8}/"


@dataclass(frozen=True)
class Wanted:
    """`kind`: which argument says what the answer has to be; `value`: that argument. The others: see `wanted`."""

    kind: str
    value: Any
    options: Mapping[str, Any] = field(default_factory=dict)


def wanted(args: Mapping[str, Any]) -> Wanted:
    """The arguments, of which one says what the answer has to be. Raises ValueError for what nobody knows.

    `json`: a schema, as an object or as text; `json_object`: true for any object; `regex`; `grammar`: Lark, or GBNF
    (EBNF with ::=); `choice`: a list of texts; `lark`: a grammar that a parser of tool calls wrote, with `tags`: rule
    -> text of a tag, for each of which there are a rule of that name and `before_NAME`, text up to and with the tag.
    `lenient`: ignore keywords of a schema that cannot be enforced. `whitespace`: false for none between JSON's
    members; `whitespace_pattern`: a regex for it. `thought`: {"open", "close": tags, "opened": whether the prompt
    ends inside}: what may come before the answer. `calls`: {"lark", "tags"}: what the answer may be instead.
    """
    kinds = [kind for kind in _KINDS if args.get(kind) is not None]
    unknown = set(args) - set(_KINDS) - _OPTIONS
    if unknown:
        raise ValueError(f"there is no argument {min(unknown)!r}")
    if len(kinds) != 1:
        raise ValueError(f"give one of {', '.join(_KINDS[:-1])}, not {' and '.join(kinds) or 'none'}")
    kind = kinds[0]
    return Wanted(kind, _checked(kind, args[kind]), {name: args[name] for name in _OPTIONS & set(args)})


def grammar_text(want: Wanted, tag: TagRule) -> str:
    """All of it as one text for llguidance, which is the same for the same arguments."""
    answers = {"answer": _answer(want, tag)}
    calls, thought = want.options.get("calls"), want.options.get("thought")
    if calls is not None:
        answers["calls"] = _answer(wanted(calls), tag)
    either = "(" + " | ".join(f"@{name}" for name in answers) + ")"
    lark = [_OPTIONS_OF_LLGUIDANCE, f"start: {either}"]
    if thought is not None:
        lark[1] = f"start: thought space {either}" if thought["opened"] else f"start: (open thought space)? {either}"
        before = _tag_rules("close", thought["close"], tag)[1].replace("before_close", "thought")
        lark += [f"space: {_SPACE}", _tag_rules("open", thought["open"], tag)[0], before]
    parts = [{**part, "name": name} for name, part in answers.items()]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lark)}, *parts]})


def regex_of(want: Wanted) -> str | None:
    """The regular expression that the answer is, where it is nothing else."""
    alone = want.options.get("calls") is None and want.options.get("thought") is None
    return str(want.value) if want.kind == "regex" and alone else None


def _checked(kind: str, value: Any) -> Any:
    if kind == "json_object":
        if value is not True:
            raise ValueError("json_object has to be true")
        return value
    if kind == "choice":
        texts = value if isinstance(value, list) else []
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("the choices have to be a list of texts that are not empty")
        size = sum(map(len, texts))
    elif kind == "json" and isinstance(value, dict | bool):
        size = len(json.dumps(value))
    elif isinstance(value, str) and value:
        size = len(value)
        if kind == "json":
            value = _schema(value)
    else:
        what = "a JSON schema: an object, or its text" if kind == "json" else "a text that is not empty"
        raise ValueError(f"the {kind} has to be {what}")
    if size > MOST_CHARACTERS[kind]:
        raise ValueError(f"the {kind} has {size} characters; at most {MOST_CHARACTERS[kind]} are allowed")
    _check_encodable(value)
    return value


def _check_encodable(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair, which is no character") from error


def _schema(text: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON schema is an object")
    return schema


def _answer(want: Wanted, tag: TagRule) -> dict[str, Any]:
    match want.kind:
        case "json" | "json_object":
            schema = {"type": "object"} if want.kind == "json_object" else want.value
            return {"json_schema": _with_options(schema, want.options)}
        case "regex":
            made: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(want.value))["grammars"][0]
            return {"lark_grammar": made["lark_grammar"]}
        case "grammar":
            return {"lark_grammar": _lark(want.value)}
        case "choice":
            # A terminal is one item of the parser however many texts it has, and there is a limit on items.
            texts = " | ".join(_quoted(text) for text in want.value)
            return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}
        case _:
            tags = want.options.get("tags", {})
            rules = [rule for name, text in tags.items() for rule in _tag_rules(name, text, tag)]
            return {"lark_grammar": "\n".join([want.value, *rules])}


def _with_options(schema: Any, options: Mapping[str, Any]) -> Any:
    """The schema with llguidance's own options in it."""
    chosen = {
        "lenient": options.get("lenient"),
        "whitespace_flexible": options.get("whitespace"),
        "whitespace_pattern": options.get("whitespace_pattern"),
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if schema is False:
        raise ValueError("the schema false allows nothing")
    schema = {} if schema is True else {name: value for name, value in schema.items() if name != "x-guidance"}
    return {**schema, "x-guidance": chosen} if chosen else schema


def _lark(text: str) -> str:
    """Lark as it is; GBNF translated."""
    try:
        lark: str = any_to_lark(text)
    except Exception as error:
        raise ValueError(f"the grammar is neither Lark nor GBNF: {error}") from error
    return lark


def _tag_rules(name: str, text: str, tag: TagRule) -> list[str]:
    """The rules `name` and `before_name`."""
    if not _RULE.fullmatch(name) or not isinstance(text, str) or not text:
        raise ValueError(f"{name!r} is no tag")
    token = tag(text)
    if token is not None:
        return [f"{name}: {token}", f"before_{name}: /(?s:.*)/ {token}"]
    return [f"{name}: {_quoted(text)}", f"before_{name}[suffix={_quoted(text)}]: /(?s:.*)/"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
