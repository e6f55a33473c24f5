"""Limits of one render of a chat template: CPU time, counted as it works, and memory, predicted before it is taken.

A template is a program that came with a download, and it may behave on one message and loop on another. Nothing in
Python interrupts a thread, so the code that `sandbox` compiles tells a `Budget` about every turn of a loop, every
call and everything that it makes.

Memory is counted in regions. A turn of a loop, or a call of a macro, ends with all that it made, except for what it
put into a namespace (`Kept`) or returned. So the count is never below what is alive, and an ordinary template over a
long conversation stays far below the limit.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log2
from sys import getrefcount, getsizeof
from typing import Any

from jinja2.utils import Namespace

CPU_SECONDS = 1.0
"""Most CPU time of the thread that renders."""

MEMORY_BYTES = 16 << 20
"""Most bytes that a render may hold at once, and `PER_INPUT_BYTE` more for each byte of the conversation. The text is
joined at the end and copied on the way, so the process grows by up to two and a half times as much."""

PER_INPUT_BYTE = 8

SLOW_SECONDS = 0.05
"""A render that has taken this long goes on only while no other such render does, so that several of them do not take
the interpreter from the thread that sends streams."""

MAX_WAITING = 3
"""The number of such renders that may wait for the one that goes on: each has a thread, which health checks need
too. A further one is refused."""

TURN = 100
"""Work of one turn or call, in the unit of work: what it takes to copy a byte."""

STRIDE = 400_000
"""Work between two looks at the clock: well below a millisecond."""

SHORT = 1000
"""Characters of a text that containers may hold many times over without a word."""

GARBAGE_BYTES = 32 << 20
"""Most bytes of renders that may wait for Python's garbage collector."""

MAX_DEPTH = 500
MAX_BITS = 1 << 13
MAX_SORTED = 100_000
MAX_COMPARED = 1 << 27
"""Pairs of characters that one search may compare where it compares each with each: a tenth of a second."""

_slow = threading.Lock()
_slow_or_waiting = threading.BoundedSemaphore(1 + MAX_WAITING)


class _Garbage:
    """Bytes that renders may have left behind in cycles."""

    def __init__(self) -> None:
        self._size = 0

    def add(self, size: int) -> None:
        """Collect if there may be too much."""
        if size > STRIDE:
            self._size += size  # two threads may lose one of two sums, and collect a little later
            if self._size > GARBAGE_BYTES:
                self._size = 0
                gc.collect()


_garbage = _Garbage()

_SCALARS = frozenset({str, int, float, bool, type(None)})
_LIGHT = _SCALARS - {str}
_CONTAINERS: tuple[type, ...] = (
    *(dict, list, tuple, set, frozenset, Namespace),
    *(type({}.keys()), type({}.values()), type({}.items())),
)


class OverBudget(Exception):
    """A render used more than it may; the text says more than what."""


class Busy(Exception):
    """Too many slow renders wait already."""


def size_of(text: str) -> int:
    """Bytes of a text in memory."""
    return len(text) + 56 if text.isascii() else getsizeof(text)


def width_of(text: str) -> int:
    """Bytes of a character of `text`: 1, 2 or 4."""
    if text.isascii():
        return 1
    return 4 if len(text) < 256 else -(-(getsizeof(text) - 80) // len(text))


class Budget:
    """One request's."""

    __slots__ = ("_began", "_inputs", "_room", "_slow", "_trees", "_work", "composed", "floor", "held", "kept")

    def __init__(self) -> None:
        self._inputs: Any = ()
        self._trees: frozenset[int] | None = None
        self._room = MEMORY_BYTES
        self._began: float | None = None
        self._slow = False
        self._work = STRIDE
        self.held = 0
        """Bytes made in the turns and calls that go on."""
        self.floor = 0
        """Of these, what must stay counted when they end."""
        self.kept = 0
        """Bytes of the prompt and of texts in namespaces."""
        self.composed = False
        """True if the template may have put a container or a long text into containers many times over."""

    def given(self, inputs: Any) -> None:
        """A render begins with these variables: JSON values, which hold nothing twice. Their size gives it room."""
        self._inputs, self._trees, self._room = inputs, None, MEMORY_BYTES
        self.held = self.floor = self.kept = 0

    def close(self) -> None:
        """Let the next slow render go on.

        Namespaces and macros may hold themselves. Python collects such garbage by the number of objects, however large
        they are, so it is collected here by its size.
        """
        if self._slow:
            _slow.release()
            _slow_or_waiting.release()
            self._slow = False
        _garbage.add(self.held + self.kept)

    # --- time

    def turn(self, held: int, work: int = TURN) -> None:
        """A turn of a loop begins; when the first one did, `held` bytes were held."""
        self.held = held if held > self.floor else self.floor
        self._work -= work
        if self._work < 0:
            self._look()

    def spend(self, work: int = TURN) -> None:
        """Count `work`, and look at the clock now and then."""
        self._work -= work
        if self._work < 0:
            self._look()

    def expect_work(self, work: int) -> None:
        """Count the work of one operation, which may not be more than a tenth of a second's."""
        if work > MAX_COMPARED:
            raise OverBudget("one comparison with too much to compare")
        self.spend(work)

    def _look(self) -> None:
        self._work = STRIDE
        now = time.thread_time()
        if self._began is None:
            self._began = now
            return
        spent = now - self._began
        if spent > CPU_SECONDS:
            raise OverBudget(f"more than {CPU_SECONDS:g} s of CPU time")
        if spent > SLOW_SECONDS and not self._slow:
            if not _slow_or_waiting.acquire(blocking=False):
                raise Busy
            _slow.acquire()
            self._slow = True

    # --- memory

    def expect(self, size: int) -> None:
        """Raises OverBudget where something of `size` bytes has no room; it is not counted yet."""
        if self.held + self.kept + size > self._room:
            if self._room == MEMORY_BYTES:
                self._room += 1 + PER_INPUT_BYTE * _bytes_of(self._inputs)
            if self.held + self.kept + size > self._room:
                raise OverBudget(f"more than {MEMORY_BYTES >> 20} MB of memory beyond the size of the messages")

    def hold(self, size: int) -> None:
        """Count `size` bytes until the turn or call ends."""
        self.held += size
        self._work -= size
        if self._work < 0:
            self._look()
            self.expect(0)

    def keep(self, size: int) -> None:
        """Count `size` bytes until the render ends."""
        self.kept += size
        self.expect(0)

    def copied(self, size: int, work: int = TURN) -> None:
        """A turn of a loop begins whose output, or what else it makes, outlives it."""
        self.hold(size)
        self.spend(work)

    def made(self, value: Any) -> Any:
        """`value`, which is new, counted."""
        if value.__class__ is str:
            self.hold(len(value) + 56 if value.isascii() else getsizeof(value))
        elif isinstance(value, str):
            self.hold(getsizeof(value))
        elif isinstance(value, (list, tuple)):
            self.hold(56 + 8 * len(value))
        elif isinstance(value, dict):
            self.hold(64 + 100 * len(value))
        return value

    def left(self, held: int, value: Any) -> Any:
        """The `value` that a macro has returned, before whose call `held` bytes were held."""
        self.held = held if held > self.floor else self.floor
        return self.made(value)

    # --- what a single operation may take

    def weigh(self, value: Any) -> int:
        """Bytes that the text of a container may take. Raises OverBudget if they have no room.

        A list that holds a list twice, which holds another one twice, and so on, is small and has a text without end.
        """
        total, level = 0, [value]
        for _ in range(MAX_DEPTH):
            below: list[Any] = []
            for item in level:
                total += 32
                if item.__class__ in _SCALARS:
                    total += 2 * len(item) if item.__class__ is str else 0
                elif isinstance(item, str):
                    total += 2 * len(item)
                elif isinstance(item, _CONTAINERS):
                    below.extend(self._inside(item, total + 32 * len(below)))
            self.expect(total)
            if not below:
                return total
            self.spend(TURN * len(below))
            level = below
        raise OverBudget(f"containers in each other more than {MAX_DEPTH} deep")

    def _inside(self, item: Any, total: int) -> Iterable[Any]:
        values = attributes_of(item) if isinstance(item, Namespace) else item
        self.expect(total + 32 * len(values))
        if isinstance(values, dict):
            return [*values, *values.values()]
        members: Iterable[Any] = values
        return members

    def takes(self, *values: Any) -> None:
        """A filter takes these besides what it works on."""
        for value in values:
            if value.__class__ not in _SCALARS:
                self.composed = True
                self.deep(value)
            elif value.__class__ is str and len(value) > SHORT:
                self.composed = True

    def deep(self, *values: Any) -> None:
        """For an operation that reads containers to their depth."""
        if self.composed:
            for value in values:
                if value.__class__ not in _SCALARS and isinstance(value, _CONTAINERS) and not self._is_tree(value):
                    self.weigh(value)

    def _is_tree(self, value: Any) -> bool:
        """True for a part of the variables that the template was given."""
        if self._trees is None:
            self._trees = frozenset(_containers_in(self._inputs))
        return id(value) in self._trees

    def key(self, value: Any) -> Any:
        """`value`, which is to be hashed."""
        if isinstance(value, tuple):
            self.weigh(value)
        return value

    def searched(self, text: Any, part: Any) -> None:
        """For an operation that may compare each character of `text` with each of `part`."""
        if isinstance(text, str) and isinstance(part, str):
            if len(text) * len(part) > MAX_COMPARED:
                raise OverBudget("a search of too long a text in too long a text")
            self.spend(len(text) + len(part))

    def sorted(self, values: Any) -> None:
        """For an operation that sorts `values`."""
        self.weigh(values)
        count = len(values) if hasattr(values, "__len__") else 0
        if count > MAX_SORTED:
            raise OverBudget(f"more than {MAX_SORTED:,} values to sort")
        self.expect(16 * count)
        self.spend(int(count * log2(count + 1)) * 100)

    # --- operations of templates

    def text(self, value: Any) -> str:
        """`str(value)`."""
        if value.__class__ in _SCALARS or not isinstance(value, _CONTAINERS):
            return str(value)
        self.deep(value)
        text: str = self.made(str(value))
        return text

    def concat(self, pieces: Sequence[str]) -> str:
        """The texts in a row."""
        total = sum(map(len, pieces))
        if total > STRIDE:
            self.expect(total * max(map(width_of, pieces)))
        joined = "".join(pieces)
        size = total + 56 if joined.isascii() else getsizeof(joined)
        self.held += size
        self._work -= size
        if self._work < 0:
            self.hold(0)
        return joined

    def join(self, *values: Any) -> str:
        """`a ~ b ~ c`."""
        for value in values:
            if value.__class__ is not str:
                return self.concat([value if value.__class__ is str else self.text(value) for value in values])
        return self.concat(values)

    def add(self, *values: Any) -> Any:
        """`a + b + c`."""
        for value in values:
            if value.__class__ is not str:
                break
        else:
            return self.concat(values)
        total = values[0]
        for value in values[1:]:
            total = self._sum(total, value)
        return total

    def _sum(self, left: Any, right: Any) -> Any:
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            return self.number(left + right)
        if isinstance(left, str) and isinstance(right, str):
            self.expect(6 * (size_of(left) + size_of(right)))  # one that is marked as safe escapes the other
        elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            self.expect(8 * (len(left) + len(right)))
            self.composed = True
        return self.made(left + right)

    def number(self, value: Any) -> Any:
        """`value`, which must not be too long a number."""
        if value.__class__ is int and value.bit_length() > MAX_BITS:
            raise OverBudget(f"a number of more than {MAX_BITS} bits")
        return value

    def compose(self, value: Any) -> Any:
        """A new list, tuple or dict."""
        self.holds(value.values() if value.__class__ is dict else value)
        self.hold(32 * len(value))  # numbers, which nothing else counts
        return self.made(value)

    def holds(self, values: Iterable[Any]) -> None:
        """A new container holds these."""
        for value in values:
            if value.__class__ not in _SCALARS or (value.__class__ is str and len(value) > SHORT):
                self.composed = True

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`."""
        if isinstance(value, str):
            self.expect(size_of(value))
        elif isinstance(value, (list, tuple)):
            self.expect(8 * len(value))
        return self.made(value[start:stop:step])

    def ticking(self, items: Iterable[Any], work: int = TURN) -> Iterator[Any]:
        """The items, each a turn."""
        for item in items:
            self._work -= work
            if self._work < 0:
                self._look()
            yield item


class Kept(Namespace):
    """A namespace, whose contents outlive the turns of loops."""

    def __init__(self, budget: Budget, /, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "_budget", budget)
        attributes = attributes_of(self)
        budget.hold(500 + 100 * len(attributes))
        for value in attributes.values():
            _store(budget, value)

    def __setitem__(self, name: str, value: Any) -> None:
        budget: Budget = object.__getattribute__(self, "_budget")
        attributes = attributes_of(self)
        old = attributes.get(name)
        if old.__class__ in _LIGHT and value.__class__ in _LIGHT:
            attributes[name] = value
            return
        # A value that nothing else refers to is gone when it is replaced.
        if (old.__class__ is str or old.__class__ is list) and getrefcount(old) == _ALONE:
            budget.kept -= size_of(old) if old.__class__ is str else 56 + 8 * len(old)
        _store(budget, value)
        attributes[name] = value


def _store(budget: Budget, value: Any) -> None:
    if value.__class__ is str:
        budget.keep(size_of(value))
    elif value.__class__ not in _SCALARS:
        budget.composed = True
        budget.floor = budget.held
        budget.expect(0)


def _references() -> int:
    """The number that `getrefcount` gives for a value that a dict and a local variable hold."""
    values = {"one": [0]}
    old = values.get("one")
    return getrefcount(old)


_ALONE = _references()


def attributes_of(namespace: Namespace) -> dict[str, Any]:
    """The members of a namespace."""
    attributes: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return attributes


def _bytes_of(value: Any) -> int:
    """Bytes of a JSON value in memory, roughly."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        total += size_of(item) if isinstance(item, str) else 32
        waiting.extend(_members(item))
    return total


def _containers_in(value: Any) -> Iterator[int]:
    """The ids of the containers in a JSON value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        yield id(item)
        for member in item.values() if isinstance(item, Mapping) else item:
            if member.__class__ not in _SCALARS and isinstance(member, (Mapping, list, tuple)):
                waiting.append(member)


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return value if isinstance(value, (list, tuple)) else ()
