"""Prefix caches: a radix tree over content ids, and one that keeps nothing."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from llmcore.api import KVManagerSpec, hookimpl
from llmcore.api.sched import Int32, Int64

NOTHING: Int32 = np.empty(0, np.int32)


class Node:
    """A node of the radix tree: whole granules of content ids, the granules that hold them, and its children.

    A request whose match ends inside a node splits it, so a request holds a node as a whole or not at all.
    """

    __slots__ = ("children", "content", "granules", "key", "parent", "stamp", "ticket")

    def __init__(self, parent: Node | None, key: bytes, content: Int64, granules: Int32) -> None:
        self.parent = parent
        self.key = key
        self.content = content
        self.granules = granules
        self.children: dict[bytes, Node] = {}
        self.stamp = 0
        """The clock at its last use."""
        self.ticket = 0
        """The number of its valid entry in the heap of leaves; 0: it has none."""


class RadixCache:
    """A prefix cache: a radix tree over granules of content ids. It evicts the least recently used free leaf first.

    A heap orders the leaves by their last use. If `evict` meets a leaf that a request holds, it removes the leaf from
    the heap. The request calls `insert` before it gives up its granules, and `insert` puts the leaf back. So the
    eviction of n granules looks at about n granules.
    """

    caching = True

    def __init__(self, granule: int = 1) -> None:
        self._granule = granule
        self._roots: dict[bytes, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._tickets = 0
        self._granules = 0
        self._nodes = 0

    def match(self, salt: bytes, content: Int64) -> Int32:
        """The granules that hold the longest cached prefix of `content`, whole granules only, in order."""
        path, _, _ = self._walk(salt, content)
        self._touch(path)
        return np.concatenate([node.granules for node in path]) if path else NOTHING

    def insert(self, salt: bytes, content: Int64, granules: Int32) -> Int32:
        """Keep `granules` for `content`; returns the new ones (the cache has the content of the others already)."""
        content = content[: granules.size * self._granule]
        path, at, parent = self._walk(salt, content)
        if at == content.size:
            self._touch(path)
            return NOTHING
        if parent is None:
            parent = self._roots[salt] = Node(None, salt, content[:0], NOTHING)
        new = granules[at // self._granule :].copy()
        leaf = Node(parent, self._key(content, at), content[at:].copy(), new)
        parent.children[leaf.key] = leaf
        self._granules += new.size
        self._nodes += 1
        self._touch([*path, leaf])
        return new

    def remove(self, salt: bytes, content: Int64, start: int) -> Int32:
        """Drop `content` from token `start` on, and everything that continues it; returns the dropped granules."""
        start = start // self._granule * self._granule
        _, at, parent = self._walk(salt, content[:start])
        if parent is None or at < start:
            return NOTHING
        top = parent.children.get(self._key(content, at))
        if top is None:
            return NOTHING
        dropped = list(_below(top))
        for node in dropped:
            self._forget(node)
        self._detach(top)
        return np.concatenate([node.granules for node in dropped])

    def evict(self, n: int, in_use: Callable[[Int32], NDArray[np.bool_]]) -> Int32:
        """Drop up to `n` granules, least recently used first, and return them.

        `in_use` tells for each granule whether a request holds it; such granules stay.
        """
        dropped: list[Int32] = []
        while n > 0 and self._leaves:
            _, ticket, leaf = heapq.heappop(self._leaves)
            if leaf.ticket != ticket:
                continue
            leaf.ticket = 0
            used = in_use(leaf.granules)
            if leaf.children or used[-1]:
                continue
            first = max(_after_last(used), leaf.granules.size - n)
            dropped.append(leaf.granules[first:])
            n -= leaf.granules.size - first
            self._shorten(leaf, first)
        return np.concatenate(dropped) if dropped else NOTHING

    def stats(self) -> Mapping[str, int]:
        """The number of granules in the cache, and of nodes in the tree."""
        return {"granules": self._granules, "nodes": self._nodes}

    def _walk(self, salt: bytes, content: Int64) -> tuple[list[Node], int, Node | None]:
        """The nodes along `content`, the number of matched tokens, and the deepest node.

        Splits the last node if only its beginning matches.
        """
        node = self._roots.get(salt)
        path: list[Node] = []
        at = 0
        while node is not None and at < content.size:
            child = node.children.get(self._key(content, at))
            if child is None:
                break
            same = self._common(child.content, content[at:])
            if same < child.content.size:
                child = self._split(child, same)
            path.append(child)
            node = child
            at += same
        return path, at, node

    def _key(self, content: Int64, at: int) -> bytes:
        return content[at : at + self._granule].tobytes()

    def _common(self, a: Int64, b: Int64) -> int:
        size = min(a.size, b.size)
        differs = a[:size] != b[:size]
        first = int(differs.argmax())
        same = first if differs[first] else size
        return same // self._granule * self._granule

    def _split(self, node: Node, tokens: int) -> Node:
        """Cut `node` after `tokens`; returns the new upper part."""
        assert node.parent is not None
        upper = Node(node.parent, node.key, node.content[:tokens], node.granules[: tokens // self._granule])
        upper.stamp = node.stamp
        node.parent.children[node.key] = upper
        node.parent = upper
        node.key = self._key(node.content, tokens)
        node.content = node.content[tokens:]
        node.granules = node.granules[tokens // self._granule :]
        upper.children[node.key] = node
        self._nodes += 1
        return upper

    def _touch(self, path: list[Node]) -> None:
        self._clock += 1
        for node in path:
            node.stamp = self._clock
        if path and not path[-1].children:
            self._queue(path[-1])

    def _queue(self, leaf: Node) -> None:
        self._tickets += 1
        leaf.ticket = self._tickets
        heapq.heappush(self._leaves, (leaf.stamp, leaf.ticket, leaf))
        if len(self._leaves) > 2 * self._nodes + 64:
            self._leaves = [entry for entry in self._leaves if entry[2].ticket == entry[1]]
            heapq.heapify(self._leaves)

    def _shorten(self, leaf: Node, size: int) -> None:
        self._granules -= leaf.granules.size - size
        if size:
            leaf.content = leaf.content[: size * self._granule].copy()
            leaf.granules = leaf.granules[:size].copy()
            self._queue(leaf)
            return
        self._nodes -= 1
        self._detach(leaf)

    def _forget(self, node: Node) -> None:
        node.ticket = 0
        self._nodes -= 1
        self._granules -= node.granules.size

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.key]
        else:
            self._queue(parent)


class NoCache:
    """A prefix cache that keeps nothing, so every prompt is computed."""

    caching = False

    def __init__(self, granule: int = 1) -> None:
        del granule

    def match(self, salt: bytes, content: Int64) -> Int32:
        """No granules."""
        return NOTHING

    def insert(self, salt: bytes, content: Int64, granules: Int32) -> Int32:
        """No granules: it keeps none."""
        return NOTHING

    def remove(self, salt: bytes, content: Int64, start: int) -> Int32:
        """No granules."""
        return NOTHING

    def evict(self, n: int, in_use: Callable[[Int32], NDArray[np.bool_]]) -> Int32:
        """No granules."""
        return NOTHING

    def stats(self) -> Mapping[str, int]:
        """Zeros."""
        return {"granules": 0, "nodes": 0}


def _below(top: Node) -> Iterator[Node]:
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _after_last(used: NDArray[np.bool_]) -> int:
    return used.size - int(used[::-1].argmax()) if used.any() else 0


@hookimpl
def register_kv_managers() -> Iterable[KVManagerSpec]:
    """The radix tree, and the cache that keeps nothing."""
    yield KVManagerSpec(
        name="radix", make=f"{__name__}:RadixCache", summary="common prefixes in a tree, least recently used first out"
    )
    yield KVManagerSpec(name="none", make=f"{__name__}:NoCache", summary="every prompt is computed")
