"""JSON schemas whose objects have only the properties that they name.

By the standard a schema's objects are open, and a model that is held to one then adds properties without end. An
object with `properties` is closed here, unless its schema says itself which others it may have. Several schemas may
apply to one place of a document: the place's own, the one that this refers to, every part of its `allOf` and a branch
of each `anyOf` and `oneOf`. They are merged before they are closed, since no document fits two closed halves.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MOST_SCHEMAS = 200_000
"""Limit of schemas that are visited. A schema counts once for each merged place that it applies to: alternatives
multiply."""

SMALL_CHARACTERS = 500
"""A definition with fewer characters may be copied to every place that uses it."""

_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
"""Keywords that say which other properties an object may have."""

_NOTES = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "id", "$anchor", "$defs", "definitions", "discriminator", "x-guidance"),
    )
)
"""Keywords that do not restrict the document."""

_APPLIED = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_OBJECT = frozenset(("properties", "required", "additionalProperties", "patternProperties"))
_ARRAY = frozenset(("items", "prefixItems", "additionalItems"))
_CONDITIONS = ("if", "then", "else")

Node = dict[str, Any]
Place = tuple[Node, ...]
"""Schemas that all apply to one place of the document."""


def closed(schema: Any) -> Any:
    """Returns the schema with its objects closed. Raises ValueError if the schema refers to something that it does not
    hold, or has too many alternatives."""
    if not any(map(_open, _nodes(schema))):
        return schema
    if any(isinstance(node.get("$id"), str) for node in _nodes(schema) if node is not schema):
        return schema  # an embedded document: references inside it are relative to it
    return _Closing(schema).whole()


def _nodes(schema: Any) -> Iterator[Node]:
    """Yields every object in the schema."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _open(node: Node) -> bool:
    named = node.get("properties")
    return isinstance(named, dict) and bool(named) and not any(keyword in node for keyword in _SAYS)


class _Closing:
    def __init__(self, root: Node) -> None:
        self._root = root
        self._anchors = {node["$anchor"]: node for node in _nodes(root) if isinstance(node.get("$anchor"), str)}
        self._names: dict[frozenset[int], str] = {}
        self._made: dict[str, Any] = {}
        self._uses: dict[str, list[Node]] = {}
        """Name -> the references to it."""
        self._left: deque[tuple[str, Place]] = deque()
        self._parts: dict[tuple[int, str], Node] = {}
        """Parts of nodes, by the node's id and the part's name. One object per part makes equal places compare
        equal."""
        self._count = 0

    def whole(self) -> Any:
        """Returns the closed schema."""
        made = self._closed((self._root,))
        while self._left:
            name, place = self._left.popleft()
            self._made[name] = self._closed(place)
        self._put_in_place()
        return {**made, "$defs": self._made} if self._made and isinstance(made, dict) else made

    def _put_in_place(self) -> None:
        """Copy a definition to its uses if it is used once, or is small and refers to nothing. llguidance accepts an
        optional property that nothing fits. It does not accept such a definition."""
        for name, uses in self._uses.items():
            made = self._made[name]
            text = json.dumps(made) if len(uses) > 1 else ""
            small = len(text) < SMALL_CHARACTERS and '"$ref"' not in text
            if len(uses) > 1 and not small:
                continue
            del self._made[name]
            for use in uses:
                use.clear()
                use.update(made if isinstance(made, dict) else {"enum": []})

    def _at(self, schemas: Iterable[Any]) -> Any:
        """Returns the schema of a place to which all of `schemas` apply, or a reference to it."""
        found: dict[int, Node] = {}
        for schema in schemas:
            self._count += 1
            if self._count > MOST_SCHEMAS:
                raise ValueError(
                    "its alternatives make too many combinations; have fewer, or say additionalProperties in every "
                    "object"
                )
            if schema is False:
                return False
            if schema is not True and _schema(schema):
                found[id(schema)] = schema
        place = tuple(found.values())
        if not place:
            return True
        if len(place) == 1 and "$ref" not in place[0]:
            return self._closed(place)
        if len(place) == 1 and not place[0].keys() - _NOTES - {"$ref"}:
            place = (self._target(place[0]["$ref"]),)
        if isinstance(place[0], bool):
            return place[0]
        name = self._name(place)
        use = {"$ref": f"#/$defs/{name}"}
        self._uses.setdefault(name, []).append(use)
        return use

    def _name(self, place: Place) -> str:
        key = frozenset(map(id, place))
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._left.append((self._names[key], place))
        return self._names[key]

    def _closed(self, place: Place) -> Any:
        """Returns the schema of a place."""
        applied = self._applied(place)
        if applied is None:
            return False
        flats, groups = applied
        if not groups:
            return self._merged(flats)
        keyword, branches = groups[0]
        if len(groups) == 1 and not any(flat.keys() & (_OBJECT | _ARRAY) for flat in flats):
            return {**_joined(flats), keyword: [self._at([branch]) for branch in branches]}
        rest = [self._part(id(others), kind, {kind: others}) for kind, others in groups[1:]]
        return {keyword: [self._at([*flats, *rest, branch]) for branch in branches]}

    def _applied(self, place: Place) -> tuple[list[Node], list[tuple[str, list[Any]]]] | None:
        """The schemas that apply without a choice, references resolved, and the choices. None: nothing fits."""
        flats: dict[int, Node] = {}
        groups: list[tuple[str, list[Any]]] = []
        path: set[int] = set()
        left: list[tuple[Any, bool]] = [(node, True) for node in reversed(place)]
        while left:
            node, enters = left.pop()
            if not enters:
                path.discard(id(node))
                continue
            if node is False:
                return None
            if node is True:
                continue
            if id(node) in path:
                raise ValueError("nothing fits it: a part of it refers to nothing but itself")
            if id(node) in flats:
                continue
            path.add(id(node))
            own = {name: value for name, value in node.items() if name not in _APPLIED | _NOTES}
            flats[id(node)] = self._part(id(node), "own", own) if len(own) < len(node) else node
            groups += [(kind, _listed(node, kind)) for kind in ("anyOf", "oneOf") if kind in node]
            parts = list(_listed(node, "allOf")) if "allOf" in node else []
            if "$ref" in node:
                parts.append(self._target(node["$ref"]))
            left.append((node, False))
            left += [(_schema(part), True) for part in reversed(parts)]
        return [flat for flat in flats.values() if flat], groups

    def _part(self, node: int, what: str, made: Node) -> Node:
        return self._parts.setdefault((node, what), made)

    def _target(self, reference: Any) -> Any:
        """Returns the schema that a reference points to."""
        text = reference if isinstance(reference, str) else ""
        base, _, fragment = text.partition("#")
        if text and base in ("", self._root.get("$id")):
            if fragment in self._anchors:
                return self._anchors[fragment]
            found: Any = self._root
            for name in unquote(fragment).split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                    found = found[int(name)]
                elif isinstance(found, dict) and name in found:
                    found = found[name]
                else:
                    break
            else:
                if isinstance(found, dict | bool) and (not fragment or fragment.startswith("/")):
                    return found
        raise ValueError(f"it refers to {str(reference)[:100]!r}, which it does not hold")

    def _merged(self, flats: Sequence[Node]) -> Any:
        """Returns one schema for all of `flats`, which have no choices."""
        made = _joined(flats)
        if any(flat.keys() & _OBJECT for flat in flats):
            made |= self._of_objects(flats)
        if any(flat.keys() & _ARRAY for flat in flats):
            made |= self._of_arrays(flats)
        return made

    def _of_objects(self, flats: Sequence[Node]) -> Node:
        """Returns the merged keywords about an object's properties."""
        named = [_mapping(flat, "properties") for flat in flats]
        names = dict.fromkeys(name for each in named for name in each)
        required = dict.fromkeys(name for flat in flats for name in _listed(flat, "required"))
        properties = {name: self._at(_said_of(name, flats)) for name in names}
        made: Node = {"required": list(required)} if required else {}
        if names and not any(keyword in flat for flat in flats for keyword in _SAYS):
            for name, schemas in self._conditional(flats).items():
                properties.setdefault(name, {"anyOf": [self._at([schema]) for schema in schemas]})
            made["additionalProperties"] = False
            properties |= {name: True for name in required if name not in properties}
        else:
            patterns = dict.fromkeys(p for flat in flats for p in _mapping(flat, "patternProperties"))
            if patterns:
                made["patternProperties"] = {p: self._at(_said_of_pattern(p, flats)) for p in patterns}
            others = [flat["additionalProperties"] for flat in flats if "additionalProperties" in flat]
            if others:
                made["additionalProperties"] = self._at(others)
        if any("properties" in flat for flat in flats):
            made["properties"] = properties
        return made

    def _conditional(self, flats: Sequence[Node]) -> dict[str, list[Any]]:
        """The schemas of properties that only conditions name, by property. llguidance does not enforce conditions."""
        found: dict[str, list[Any]] = {}
        left: list[Any] = []
        for flat in flats:
            left += [flat[keyword] for keyword in _CONDITIONS if keyword in flat]
            left += _mapping(flat, "dependentSchemas").values()
            left += [value for value in _mapping(flat, "dependencies").values() if isinstance(value, dict)]
        while left:
            node = left.pop()
            if not isinstance(node, dict):
                continue
            inner, groups = self._applied((node,)) or ([], [])
            left += [branch for _, branches in groups for branch in branches]
            left += [flat[keyword] for flat in inner for keyword in _CONDITIONS if keyword in flat]
            for flat in inner:
                for name, schema in _mapping(flat, "properties").items():
                    found.setdefault(name, []).append(schema)
        return found

    def _of_arrays(self, flats: Sequence[Node]) -> Node:
        """Returns the merged keywords about an array's items, in the terms of the newest draft."""
        said = [_items_of(flat) for flat in flats if flat.keys() & _ARRAY]
        first = max(len(prefix) for prefix, _ in said)
        made: Node = {}
        if first:
            made["prefixItems"] = [
                self._at([prefix[i] if i < len(prefix) else rest for prefix, rest in said]) for i in range(first)
            ]
        rest = self._at([rest for _, rest in said])
        return made if rest is True else {**made, "items": rest}


def _joined(flats: Sequence[Node]) -> Node:
    """Merges all keywords of `flats` except those of properties and items, into one object where they do not
    differ."""
    said = [{k: v for k, v in flat.items() if k not in _OBJECT | _ARRAY} for flat in flats]
    said = [each for each in said if each]
    joined: Node = {}
    apart = []
    for each in said:
        if all(joined.get(keyword, value) == value for keyword, value in each.items()):
            joined |= each
        else:
            apart.append(each)
    return {**joined, "allOf": apart} if apart else joined


def _said_of(name: str, flats: Iterable[Node]) -> Iterator[Any]:
    """Yields the schemas for a property of this name."""
    for flat in flats:
        found = [schema for p, schema in _mapping(flat, "patternProperties").items() if _matches(p, name)]
        if name in _mapping(flat, "properties"):
            found.append(flat["properties"][name])
        yield from found or [flat.get("additionalProperties", True)]


def _said_of_pattern(pattern: str, flats: Iterable[Node]) -> Iterator[Any]:
    for flat in flats:
        yield _mapping(flat, "patternProperties").get(pattern, flat.get("additionalProperties", True))


def _items_of(flat: Node) -> tuple[Sequence[Any], Any]:
    """Returns the schemas of the first items, and the schema of all others. In older drafts `items` may be a list."""
    items = flat.get("items", True)
    if isinstance(items, list):
        return items, flat.get("additionalItems", True)
    return _listed(flat, "prefixItems"), items


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise ValueError("a schema within it is neither an object nor true or false")
    return value


def _mapping(node: Node, keyword: str) -> Mapping[str, Any]:
    value = node.get(keyword, {})
    if not isinstance(value, dict):
        raise ValueError(f"{keyword} has to be an object")
    return value


def _listed(node: Node, keyword: str) -> list[Any]:
    value = node.get(keyword, [])
    if not isinstance(value, list):
        raise ValueError(f"{keyword} has to be a list")
    return value
