"""plugin-guided: objects of schemas are closed after all that applies to them is merged.

The oracle is jsonschema, for which an object is closed by `unevaluatedProperties`: it is false at every place of a
document (`sealed`), and knows what `allOf`, `$ref` and branches have evaluated there.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from guided_answers import VOCAB, allowed, one, spell
from jsonschema import Draft202012Validator
from llmcore.api import ProcessorContext, Tokenizer
from llmcore_devtools.tokenizer import EOS
from llmcore_guided.closing import closed

pytestmark = pytest.mark.usefixtures("patient")

I = {"type": "integer", "minimum": 0, "maximum": 3}  # noqa: E741
S = {"enum": ["s", "t"]}
NULL = {"type": "null"}


def of(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": required.split()} if required else {})}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "plain": (of("a", a=I, b=S), [{"a": 1}, {"a": 1, "b": "s"}], [{"a": 1, "c": 1}, {}]),
    "allOf": ({"allOf": [of("a", a=I), of(b=S)]}, [{"a": 1, "b": "s"}, {"a": 1}], [{"a": 1, "c": 1}, {"b": "s"}]),
    "allOf of references with own properties": (
        {
            **of("y", y=I),
            "allOf": [ref("Base")],
            "$defs": {"Base": {"allOf": [ref("Id")], **of("x", x=S)}, "Id": of("id", id=I)},
        },
        [{"y": 1, "x": "s", "id": 2}],
        [{"y": 1, "x": "s", "id": 2, "z": 1}, {"y": 1}],
    ),
    "a reference with siblings": (
        {"$ref": "#/$defs/Base", **of(y=I), "$defs": {"Base": of("x", x=S)}},
        [{"y": 1, "x": "s"}, {"x": "t"}],
        [{"x": "s", "z": 1}, {"y": 1}],
    ),
    "branches": (
        {**of("k", k=S), "anyOf": [of("a", a=I), of("b", b=I)]},
        [{"k": "s", "a": 1}, {"k": "s", "b": 1}],
        [{"k": "s"}, {"k": "s", "a": 1, "c": 1}],
    ),
    "branches of branches": (
        {"oneOf": [{"anyOf": [of("a", a=I), of("b", b=I)], **of("k", k={"const": "u"})}, of("k", k={"const": "v"})]},
        [{"k": "u", "a": 1}, {"k": "v"}],
        [{"k": "v", "a": 1}, {"k": "u"}],
    ),
    "two choices": (
        {"anyOf": [of("a", a=I), of("b", b=I)], "oneOf": [of("c", c={"const": 1}), of("c d", c={"const": 2}, d=I)]},
        [{"a": 1, "c": 1}, {"b": 1, "c": 2, "d": 0}],
        [{"a": 1, "c": 1, "d": 0}, {"a": 1}],
    ),
    "recursive": (
        {**of("v", v=I, next={"anyOf": [ref("Node"), NULL]}), "$defs": {"Node": of("v", v=I, next=ref("Node"))}},
        [{"v": 1}, {"v": 1, "next": {"v": 2, "next": {"v": 3}}}, {"v": 1, "next": None}],
        [{"v": 1, "next": {"v": 2, "w": 3}}, {"v": 1, "next": {}}],
    ),
    "recursive from the root": (
        of("v", v=I, next={"$ref": "#"}),
        [{"v": 1, "next": {"v": 2}}],
        [{"v": 1, "w": 1}, {"v": 1, "next": {"v": 2, "w": 1}}],
    ),
    "items": (
        {"type": "array", "items": of("a", a=I), "maxItems": 2},
        [[], [{"a": 1}, {"a": 2}]],
        [[{"a": 1, "b": 1}], [{}]],
    ),
    "first items": (
        {"type": "array", "prefixItems": [of("a", a=I)], "items": of("b", b=I), "minItems": 1, "maxItems": 2},
        [[{"a": 1}], [{"a": 1}, {"b": 1}]],
        [[{"b": 1}], [{"a": 1}, {"a": 1}]],
    ),
    "an open object": ({"type": "object"}, [{"z": 1}, {}], [[]]),
    "no properties": ({"type": "object", "properties": {}, "maxProperties": 2}, [{"z": 1}, {}], [[]]),
    "an open object within": (of("o", o={"type": "object"}), [{"o": {"z": 1}}], [{"o": {}, "p": 1}]),
    "it says so": (
        {**of("a", a=I), "additionalProperties": S},
        [{"a": 1, "z": "s"}],
        [{"a": 1, "z": 1}],
    ),
    "a part says so": (
        {"allOf": [of("a", a=I), {"additionalProperties": True, **of(b=S)}]},
        [{"a": 1, "z": 1}],
        [{"z": 1}],
    ),
    "patterns": (
        {**of("a", a=I), "patternProperties": {"^x": S}},
        [{"a": 1, "xy": "s"}, {"a": 1, "z": 1}],
        [{"a": 1, "xy": 1}],
    ),
    "required without a schema": (of("a b", a=I), [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "c": 3}]),
    "other values": (
        {"anyOf": [of("a", a=I), I, {"type": "array", "items": I}]},
        [{"a": 1}, 1, [1]],
        [{"a": 1, "b": 2}, "x"],
    ),
}
OPEN = {"an open object", "no properties", "an open object within", "required without a schema"}
"""What is not sealed for the oracle as a whole."""


def sealed(schema: Any, root: Any = None) -> Any:
    """The schema with unevaluatedProperties false at every place where an object has properties."""
    root = schema if root is None else root
    if not isinstance(schema, dict):
        return schema
    made = inner(schema, root)
    if not says(schema, root, set()) and names(schema, root, set()):
        made["unevaluatedProperties"] = False
    return made


def inner(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """What applies to the same place is sealed with the place, and not by itself."""
    made = dict(schema)
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in made:
            made[keyword] = [inner(part, root) if isinstance(part, dict) else part for part in made[keyword]]
    for keyword in ("properties", "patternProperties"):
        if keyword in made:
            made[keyword] = {name: sealed(part, root) for name, part in made[keyword].items()}
    if "prefixItems" in made:
        made["prefixItems"] = [sealed(part, root) for part in made["prefixItems"]]
    for keyword in ("items", "additionalProperties"):
        if keyword in made:
            made[keyword] = sealed(made[keyword], root)
    if "$defs" in made:
        made["$defs"] = {name: inner(part, root) for name, part in made["$defs"].items()}
    return made


def parts(schema: dict[str, Any], root: Any) -> list[dict[str, Any]]:
    found = [part for keyword in ("allOf", "anyOf", "oneOf") for part in schema.get(keyword, ())]
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        found.append(root if name == "#" else root["$defs"][name])
    return found


def names(schema: dict[str, Any], root: Any, seen: set[int]) -> bool:
    if id(schema) in seen:
        return False
    seen.add(id(schema))
    return bool(schema.get("properties")) or any(names(part, root, seen) for part in parts(schema, root))


def says(schema: dict[str, Any], root: Any, seen: set[int]) -> bool:
    if id(schema) in seen:
        return False
    seen.add(id(schema))
    own = any(word in schema for word in ("additionalProperties", "patternProperties", "unevaluatedProperties"))
    return own or any(says(part, root, seen) for part in parts(schema, root))


@pytest.mark.parametrize("name", SCHEMAS)
def test_documents_that_fit_and_documents_that_do_not(
    context: ProcessorContext, tokenizer: Tokenizer, name: str
) -> None:
    schema, fine, wrong = SCHEMAS[name]
    for document in fine:
        assert spell(one(context, json=schema), tokenizer, json.dumps(document)), document
        assert Draft202012Validator(schema).is_valid(document)
    for document in wrong:
        assert not spell(one(context, json=schema), tokenizer, json.dumps(document)), document


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_fits_by_the_oracle(context: ProcessorContext, tokenizer: Tokenizer, name: str) -> None:
    schema, fine, wrong = SCHEMAS[name]
    checks = [Draft202012Validator(schema)]
    if name not in OPEN:
        checks.append(Draft202012Validator(sealed(schema)))
        assert all(checks[-1].is_valid(document) for document in fine)
        assert not any(checks[-1].is_valid(document) for document in wrong), "the oracle"
    random = np.random.default_rng(len(name))
    for _ in range(12):
        document = drawn(context, tokenizer, schema, random)
        assert document is None or all(check.is_valid(json.loads(document)) for check in checks), document


def drawn(
    context: ProcessorContext, tokenizer: Tokenizer, schema: Any, random: np.random.Generator, most: int = 150
) -> str | None:
    """A random document; None for one that has no end so soon."""
    processor = one(context, json=schema, whitespace=False)
    tokens: list[int] = []
    while len(tokens) < most:
        ids = allowed(processor)
        ends = [token for token in ids if token == EOS or tokenizer.token_bytes(token) in (b"}", b"]", b'"')]
        token = int(random.choice(ends if ends and random.random() < 0.5 else ids))
        processor.accept(token)
        if token != EOS:
            tokens.append(token)
        if processor.finished():
            return b"".join(tokenizer.token_bytes(token) for token in tokens).decode()
    return None


def test_what_two_parts_say_of_one_property_is_merged(context: ProcessorContext, tokenizer: Tokenizer) -> None:
    """Closed by themselves, no document would fit both."""
    schema = {"allOf": [of(x=of("a", a=I)), of("x", x=of("b", b=I))], "type": "object"}
    lists = {"allOf": [{"items": of("a", a=I)}, {"prefixItems": [of("b", b=I)]}], "type": "array", "minItems": 1}
    for fitting, text, fits in (
        (schema, '{"x":{"a":1,"b":2}}', True),
        (schema, '{"x":{"a":1}}', False),
        (schema, '{"x":{"a":1,"b":2,"c":3}}', False),
        (lists, '[{"a":1,"b":1},{"a":1}]', True),
        (lists, '[{"a":1,"b":1},{"a":1,"b":1}]', False),
    ):
        assert spell(one(context, json=fitting), tokenizer, text) == fits, text


def test_conditions_may_name_properties_too(context: ProcessorContext, tokenizer: Tokenizer) -> None:
    """What they say is not enforced, and is possible."""
    conditions = {"if": of(k={"const": "s"}), "then": {**of(z=I), "required": ["z"]}, "else": ref("E")}
    schema = {**of("k", k=S), **conditions, "dependentSchemas": {"k": of(d=I)}, "$defs": {"E": of(e=I)}}
    for text, fits in (
        ('{"k":"s","z":1}', True),
        ('{"k":"t","e":1}', True),
        ('{"k":"t","d":1}', True),
        ('{"k":"s","z":"s"}', False),
        ('{"k":"s","q":1}', False),
    ):
        assert spell(one(context, json=schema), tokenizer, text) == fits, text


def test_the_letter_of_the_standard_is_an_option(tokenizer: Tokenizer) -> None:
    context = ProcessorContext(VOCAB, (EOS,), cache(lambda: tokenizer), (EOS,), {"guided_open_objects": True})
    schema, _, _ = SCHEMAS["plain"]
    assert spell(one(context, json=schema), tokenizer, '{"a": 1, "c": [2]}')
    assert not spell(one(context, json={**schema, "additionalProperties": False}), tokenizer, '{"a": 1, "c": [2]}')


def test_what_needs_no_closing_is_left_as_it_is() -> None:
    for schema in (
        {"type": "object"},
        {"$ref": "#/$defs/x", "$defs": {"x": {**of(a=I), "additionalProperties": False}}},
        {"type": "object", "properties": {"properties": {"type": "object"}}, "additionalProperties": True},
    ):
        assert closed(schema) in (schema, {**schema})
    embedded = {**of(a=I), "$defs": {"x": {"$id": "https://example.com/x", **of(b=I)}}}
    assert closed(embedded) is embedded


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({**of(a=I), "allOf": [ref("no")]}, r"it refers to '#/\$defs/no', which it does not hold"),
        ({**of(a=I), "$ref": "https://example.com/x"}, "https://example.com/x"),
        ({**of(a=I), "allOf": [{"$ref": "#"}]}, "refers to nothing but itself"),
        ({**of(a=I), "allOf": 3}, "allOf has to be a list"),
        ({"properties": {"a": 3}}, "neither an object nor true or false"),
        (
            {**of(a=I), "allOf": [{"anyOf": [of(**{f"p{i}{j}": I}) for j in range(12)]} for i in range(6)]},
            "too many combinations",
        ),
    ],
)
def test_what_cannot_be_closed_is_an_error(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        closed(schema)
