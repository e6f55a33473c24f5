"""The rest of a regular expression after some text, with a key by which masks can be kept.

For every mask llguidance walks the vocabulary (1 ms if most of it is allowed). It does not tell a matcher's state. The
tokens that may come next depend only on the rest of the expression: its Brzozowski derivatives (J. ACM 11, 1964) by
the characters so far. Counts are cut to the numbers that one token can tell apart (`Node.key`), so "three to sixty
words" has a dozen states instead of sixty. Only expressions that are surely read as llguidance reads them are
followed. Masks of all others are computed each time, like every mask that is not kept yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmcore_guided.expressions import Branch, Expression, Kind, Repeat, Series, expression

MOST_NODES = 10_000
"""Nodes of an expression, about 0.5 KB each. An answer that needs more goes on without keys."""
MOST_KINDS = 128
"""Kinds of characters of an expression. A node's `musts` are sets of kinds, and every node has them."""
MOST_BRANCHES, MOST_WORK, MOST_COUNTED = 32, 300, 16
"""Branches of a node, nodes that one character may touch, kinds of counted parts. With more an expression is not
followed."""


class Lost(Exception):
    """The rest of the expression is not known."""


@dataclass(eq=False, slots=True)
class Node:
    """An expression."""

    kind: str
    parts: tuple[Any, ...]
    """By `kind`: "end": nothing. "kind": a number whose bits are kinds of characters. "series": two nodes. "branch": a
    set of nodes. "repeat": (node, least, most)."""
    empty: bool
    """The empty text fits."""
    musts: frozenset[int]
    """Every text that fits has a character of each of these kinds, which are numbers like those of "kind"."""
    key: Node
    """The node that allows the same tokens as this one, and may stand for several nodes."""


_UNKNOWN = Node("unknown", (), False, frozenset(), None)  # type: ignore[arg-type]


class Residuals:
    """The residuals of one expression. Any thread may use them.

    `most(tables)`: a table says for each byte whether a character may contain it. The function returns how often one
    token of the vocabulary can have characters of every table. Raises ValueError for an expression that is not
    followed.
    """

    def __init__(self, text: str, most: Callable[[tuple[bytes, ...]], int]) -> None:
        parsed, self._characters = expression(text)
        if len(self._characters) > MOST_KINDS:
            raise ValueError("it has too many kinds of characters")
        self._most = most
        self._nodes: dict[tuple[Any, ...], Node] = {}
        self._after: dict[tuple[Node, int], Node | None] = {}
        self._kinds: dict[str, int] = {}
        self._counts: dict[frozenset[int], int] = {}
        self._work = 0
        self._lock = threading.Lock()
        self._end = self._make("end", (), True, frozenset(), None)
        try:
            self.start = self._from(parsed)
        except (Lost, RecursionError) as error:
            raise ValueError("it has too many parts") from error

    def after(self, node: Node, text: str) -> Node:
        """Returns the rest of `node` after `text`. Raises Lost."""
        for character in text:
            kinds = self._kinds.get(character)
            if kinds is None:
                kinds = self._kinds_of(character)
            left = self._after.get((node, kinds), _UNKNOWN)
            if left is _UNKNOWN:
                left = self._follow(node, kinds)
            if left is None:
                raise Lost
            node = left
        return node

    def _kinds_of(self, character: str) -> int:
        """The bits of the character's kinds, followed by the bits of the kinds that are not known to have it."""
        kinds = 0
        for i, characters in enumerate(self._characters):
            has = characters.has(character)
            kinds |= 1 << i + (len(self._characters) if has is None else 0) if has is not False else 0
        if len(self._kinds) < MOST_NODES:
            self._kinds[character] = kinds
        return kinds

    def _follow(self, node: Node, kinds: int) -> Node | None:
        with self._lock:
            if len(self._after) >= MOST_NODES:
                return None
            self._work = 0
            try:
                left = self._derivative(node, kinds)
            except (Lost, RecursionError):
                left = None
            self._after[node, kinds] = left
            return left

    def _derivative(self, node: Node, kinds: int) -> Node | None:
        """Returns the rest of `node` after a character of `kinds`. None: the character is not allowed."""
        self._work += 1
        if self._work > MOST_WORK:
            raise Lost
        match node.kind, node.parts:
            case "kind", (int(wanted),):
                if wanted << len(self._characters) & kinds and not wanted & kinds:
                    raise Lost
                return self._end if wanted & kinds else None
            case "branch", branches:
                return self._branch([self._derivative(b, kinds) for b in branches])
            case "repeat", (Node() as body, int(least), most):
                rest = self._repeat(body, max(0, least - 1), most - 1 if isinstance(most, int) else None)
                return self._series(self._derivative(body, kinds), rest)
            case "series", _:
                found: list[Node | None] = []
                while node.kind == "series":
                    first, rest = node.parts
                    found.append(self._series(self._derivative(first, kinds), rest))
                    if not first.empty:
                        break
                    node = rest
                else:
                    found.append(self._derivative(node, kinds))
                return self._branch(found)
        return None

    def _from(self, parsed: Expression) -> Node:
        match parsed:
            case Kind(number):
                return self._kind(1 << number)
            case Series(parts):
                node = self._end
                for part in reversed(parts):
                    made = self._series(self._from(part), node)
                    assert made is not None
                    node = made
                return node
            case Branch(parts):
                found = self._branch([self._from(part) for part in parts])
                assert found is not None
                return found
            case Repeat(body, least, most):
                return self._repeat(self._from(body), least, most)

    def _make(self, kind: str, parts: tuple[Any, ...], empty: bool, musts: frozenset[int], key: Node | None) -> Node:
        name = (kind, frozenset(parts)) if kind == "branch" else (kind, *parts)
        node = self._nodes.get(name)
        if node is None:
            if len(self._nodes) >= MOST_NODES:
                raise Lost
            node = Node(kind, parts, empty, musts, key)  # type: ignore[arg-type]
            node.key = node if key is None else key.key
            self._nodes[name] = node
        return node

    def _kind(self, kinds: int) -> Node:
        return self._make("kind", (kinds,), False, frozenset((kinds,)), None)

    def _series(self, first: Node | None, rest: Node) -> Node | None:
        if first is None or first is self._end:
            return None if first is None else rest
        if rest is self._end:
            return first
        keys = first.key, rest.key
        key = None if keys == (first, rest) else self._series(*keys)
        return self._make("series", (first, rest), first.empty and rest.empty, first.musts | rest.musts, key)

    def _branch(self, nodes: list[Node | None]) -> Node | None:
        branches: dict[Node, None] = {}
        kinds = 0
        for node in nodes:
            for branch in () if node is None else node.parts if node.kind == "branch" else (node,):
                if branch.kind == "kind":
                    kinds |= branch.parts[0]
                else:
                    branches[branch] = None
        if kinds:
            branches[self._kind(kinds)] = None
        if len(branches) < 2:
            return next(iter(branches), None)
        if len(branches) > MOST_BRANCHES:
            raise Lost
        found = tuple(branches)
        key = None if all(branch.key is branch for branch in found) else self._branch([b.key for b in found])
        musts = frozenset.intersection(*(b.musts for b in found))
        return self._make("branch", found, any(b.empty for b in found), musts, key)

    def _repeat(self, body: Node, least: int, most: int | None) -> Node:
        if most == 0 or body is self._end:
            return self._end
        if (least, most) == (1, 1):
            return body
        if body.empty:
            least = 0
        cut = least, most
        if max(least, most or 0) > 2 and not body.empty:
            enough = self._enough(body)
            cut = min(least, enough), None if most is None or most >= enough else most
        key = None if (body.key, *cut) == (body, least, most) else self._repeat(body.key, *cut)
        musts = body.musts if least else frozenset()
        return self._make("repeat", (body, least, most), not least, musts, key)

    def _enough(self, body: Node) -> int:
        """Returns a number of repetitions of `body` that exceeds the rest of a character and one token."""
        if body.musts not in self._counts:
            if len(self._counts) >= MOST_COUNTED:
                raise Lost
            tables = tuple(self._table(kinds) for kinds in body.musts)
            self._counts[body.musts] = self._most(tables) + 2
        return self._counts[body.musts]

    def _table(self, kinds: int) -> bytes:
        chosen = [c for i, c in enumerate(self._characters) if kinds >> i & 1]
        return bytes(any(c.may_have_byte(byte) for c in chosen) for byte in range(256))


class Place:
    """The place of one answer in its expression, `residuals`."""

    def __init__(self, residuals: Residuals) -> None:
        self.residuals = residuals
        self._node: Node | None = residuals.start
        self._half = b""

    def move(self, piece: bytes) -> None:
        """Advance by a token of these bytes."""
        if self._node is None:
            return
        piece = self._half + piece
        try:
            text, self._half = _cut(piece)
            self._node = self.residuals.after(self._node, text)
        except (Lost, UnicodeDecodeError):
            self._node = None

    @property
    def key(self) -> tuple[Node, bytes] | None:
        """A key that is equal only for places that allow the same tokens. None: the place is not known."""
        return None if self._node is None else (self._node.key, self._half)


def _cut(piece: bytes) -> tuple[str, bytes]:
    """Returns the whole characters, and the bytes of an incomplete one."""
    try:
        return piece.decode(), b""
    except UnicodeDecodeError as error:
        if error.end < len(piece) or error.reason != "unexpected end of data":
            raise
        return piece[: error.start].decode(), piece[error.start :]
