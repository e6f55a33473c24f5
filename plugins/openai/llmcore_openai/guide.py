"""The constraints that a request puts on its answers, under the names of OpenAI, vLLM, SGLang, LMDeploy and TGI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmcore.api import LogitsProcessor
from llmcore_server.api import Asked, Front, TypedGrammar, guided, refusal, typed

from llmcore_openai.requests import ResponseFormat, Sampled, StructuredOutputs

_JSON = ("json", "json_object")

_PLAIN = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Fields whose value is what the answer has to fit, and the kind of it."""

_PLACES = {
    "text": (),
    "json_object": ("value", "schema", "json_schema.schema"),
    "json_schema": ("json_schema.schema", "schema", "value"),
    "json": ("value", "schema", "json_schema.schema"),
    "regex_schema": ("regex_schema", "value"),
    "regex": ("value", "regex_schema"),
}
"""By type of a response_format: the members that may say what fits, the usual one first."""

_WHITESPACE = ("whitespace_pattern", "guided_whitespace_pattern")


def guide(front: Front, body: Sampled, **more: Any) -> LogitsProcessor | None:
    """The processor that makes the answers fit, or None where all do; `more`: further arguments for `guided`.

    Raises RequestError if fields contradict each other, or if one of them is not valid.
    """
    asked = list(_asked(body))
    if not asked:
        return None
    first, args = asked[0], {**whitespace(body, asked[0]), **more, asked[0].kind: asked[0].value}
    for one in asked:
        if not one.same(first):
            raise refusal(one.param, f"{first.param} says already what answers have to be; give one of them")
        args |= {name: value for name, value in one.options.items() if value is not None}
    return guided(front, first.param, **args)


def whitespace(body: Sampled, asked: Asked | None = None) -> dict[str, str]:
    """The argument of `guided` for white space between JSON's tokens, {} where the client does not give one. Raises
    RequestError if `asked` is not JSON."""
    for name in _WHITESPACE:
        pattern = getattr(body, name)
        if pattern is not None:
            if asked is not None and asked.kind not in _JSON:
                raise refusal(name, f"it is for JSON, and {asked.param} asks for something else")
            return {"whitespace_pattern": pattern}
    return {}


def _asked(body: Sampled) -> Iterator[Asked]:
    """All that the body asks for; empty values ask for nothing."""
    if body.response_format is not None:
        yield from _response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _structured(body.structured_outputs)
    for name, kind in _PLAIN.items():
        value = getattr(body, name)
        if value not in (None, "", [], False):
            yield Asked(name, kind, value)
    if isinstance(body.grammar, TypedGrammar):
        yield typed("grammar", body.grammar)
    elif body.grammar:
        yield Asked("grammar", "grammar", body.grammar)


def _response_format(given: ResponseFormat) -> Iterator[Asked]:
    """At most one. Servers differ in where a schema or an expression stands."""
    param = "response_format"
    wrapped = None if given.json_schema is None else given.json_schema.schema
    values = {
        "json_schema.schema": wrapped,
        "schema": given.schema,
        "regex_schema": given.regex_schema,
        "value": given.value,
    }
    found = {place: value for place, value in values.items() if value not in (None, "")}
    places = _PLACES[given.type]
    for place in found:
        if place not in places:
            raise refusal(f"{param}.{place}", f"a response_format of type {given.type} does not have it")
    if given.type == "text" and given.json_schema is None:
        return
    if not found and given.json_schema is None and given.type == "json_object":
        yield Asked(param, "json_object", True)
    elif given.type == "text" or not found:
        missing = f"{param}.{places[0].partition('.')[0] if given.json_schema is None else 'json_schema.schema'}"
        raise refusal(missing, "this field is required", "missing_required_parameter")
    elif len(found) > 1:
        first, second = list(found)[:2]
        raise refusal(f"{param}.{second}", f"{param}.{first} says already what answers have to be")
    strict = given.strict or (given.json_schema is not None and given.json_schema.strict)
    for place, value in found.items():
        kind = "regex" if place == "regex_schema" else "json"
        asked = Asked(f"{param}.{place}", kind, value)
        if place == "value":
            asked = typed(param, TypedGrammar(given.type, value))
        yield replace(asked, options={"strict": True}) if strict and asked.kind == "json" else asked


def _structured(given: StructuredOutputs) -> Iterator[Asked]:
    values: Mapping[str, Any] = {
        "json": given.json,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": given.json_object or None,
    }
    options = {
        "whitespace": False if given.disable_any_whitespace else None,
        "whitespace_pattern": given.whitespace_pattern,
    }
    for name in ("disable_any_whitespace", "whitespace_pattern"):
        if getattr(given, name) and given.json is None and not given.json_object:
            raise refusal(f"structured_outputs.{name}", "it is for json and json_object")
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(given, name) not in (None, False):
            param = f"structured_outputs.{name}"
            raise refusal(param, "this server does not support it; leave it out", "unsupported_parameter")
    for name, value in values.items():
        if value is not None:
            yield Asked(f"structured_outputs.{name}", name, value, options)
