"""The limits of one render of a chat template: CPU time, counted during the work, and memory, predicted beforehand.

A template is a program that came with a download. It may be harmless for one message and loop for another. Python
cannot interrupt a thread. So the code that `sandbox` compiles tells a `Budget` about every turn of a loop, every call
and every new value.

Memory is counted in regions. The end of a loop's turn or of a macro's call frees everything that was made in it,
except values that it stored in a namespace (`Kept`) or returned. So the count is never below the memory in use, and a
usual template stays far below the limit even for a long conversation.
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
"""Most seconds of CPU time of the thread that renders."""

MEMORY_BYTES = 16 << 20
"""Most bytes that a render may hold at once, plus `PER_INPUT_BYTE` for each byte of the conversation. Joins and copies
of the text let the process grow by up to two and a half times as much."""

PER_INPUT_BYTE = 8

SLOW_SECONDS = 0.05
"""Seconds of CPU time after which a render is slow.

Only one slow render runs at a time, so that the thread that sends streams gets the interpreter.
"""

MAX_WAITING = 3
"""Most slow renders that may wait for the running one; further ones are refused.

Each waiting render occupies a thread, and health checks need threads too.
"""

TURN = 100
"""Work of one turn of a loop or one call. The unit of work is the copy of one byte."""

STRIDE = 400_000
"""Work between two checks of the clock, well below a millisecond."""

SHORT = 1000
"""Most characters of a text that containers may hold many times without setting `Budget.composed`."""

GARBAGE_BYTES = 32 << 20
"""Most bytes of finished renders that may wait for Python's garbage collector."""

MAX_DEPTH = 500
MAX_BITS = 1 << 13
MAX_SORTED = 100_000
MAX_COMPARED = 1 << 27
"""Most pairs of characters that one search may compare: it then takes a tenth of a second."""

_slow = threading.Lock()
_slow_or_waiting = threading.BoundedSemaphore(1 + MAX_WAITING)


class _Garbage:
    """Counts the bytes that finished renders may have left in reference cycles."""

    def __init__(self) -> None:
        self._size = 0

    def add(self, size: int) -> None:
        """Add a render's bytes, and collect garbage if there may be too much."""
        if size > STRIDE:
            self._size += size  # Two threads may lose one of two additions; the collection is then a little later.
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
    """A render exceeded a limit; the text names the limit."""


class Busy(Exception):
    """Too many slow renders are waiting."""


def size_of(text: str) -> int:
    """The size of a text in memory, in bytes."""
    return len(text) + 56 if text.isascii() else getsizeof(text)


def width_of(text: str) -> int:
    """Bytes per character of `text` in memory: 1, 2 or 4."""
    if text.isascii():
        return 1
    return 4 if len(text) < 256 else -(-(getsizeof(text) - 80) // len(text))


class Budget:
    """The budget of one request. Methods raise OverBudget when a limit is exceeded."""

    __slots__ = ("_began", "_inputs", "_room", "_slow", "_trees", "_work", "composed", "floor", "held", "kept")

    def __init__(self) -> None:
        self._inputs: Any = ()
        self._trees: frozenset[int] | None = None
        self._room = MEMORY_BYTES
        self._began: float | None = None
        self._slow = False
        self._work = STRIDE
        self.held = 0
        """Bytes of the values that running turns and calls have made."""
        self.floor = 0
        """The part of `held` that must stay counted when they end."""
        self.kept = 0
        """Bytes of the prompt and of texts in namespaces."""
        self.composed = False
        """True if the template may have put the same container or long text into containers many times."""

    def given(self, inputs: Any) -> None:
        """Start a render with these variables, whose size extends the limit.

        They are JSON values, so a container never appears in them twice.
        """
        self._inputs, self._trees, self._room = inputs, None, MEMORY_BYTES
        self.held = self.floor = self.kept = 0

    def close(self) -> None:
        """End the work of this budget, and let the next slow render run.

        Namespaces and macros may refer to themselves. Python collects such garbage by the number of objects, whatever
        their size, so this method collects it by size.
        """
        if self._slow:
            _slow.release()
            _slow_or_waiting.release()
            self._slow = False
        _garbage.add(self.held + self.kept)

    # --- time

    def turn(self, held: int, work: int = TURN) -> None:
        """Start a turn of a loop and free what the previous turn made. `held`: `self.held` before the loop."""
        self.held = held if held > self.floor else self.floor
        self._work -= work
        if self._work < 0:
            self._look()

    def spend(self, work: int = TURN) -> None:
        """Count `work`, and check the clock from time to time."""
        self._work -= work
        if self._work < 0:
            self._look()

    def expect_work(self, work: int) -> None:
        """Count the work of one operation. Raises OverBudget if it may take more than a tenth of a second."""
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
        """Raise OverBudget if a value of `size` bytes does not fit. Does not count the value."""
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
        """Start a turn of a loop whose results stay alive, and count `size` bytes for them."""
        self.hold(size)
        self.spend(work)

    def made(self, value: Any) -> Any:
        """Count the size of the new `value`; returns it."""
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
        """Count the `value` that a macro returned; returns it. `held`: `self.held` before the call."""
        self.held = held if held > self.floor else self.floor
        return self.made(value)

    # --- predictions for single operations

    def weigh(self, value: Any) -> int:
        """Most bytes that the text of a container may take. Raises OverBudget if they do not fit.

        A list that holds a list twice, which holds another list twice, and so on, is small, but its text is huge.
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
        """Note the arguments of a filter besides its value: the result may hold them many times."""
        for value in values:
            if value.__class__ not in _SCALARS:
                self.composed = True
                self.deep(value)
            elif value.__class__ is str and len(value) > SHORT:
                self.composed = True

    def deep(self, *values: Any) -> None:
        """Check `values` before an operation that reads containers recursively."""
        if self.composed:
            for value in values:
                if value.__class__ not in _SCALARS and isinstance(value, _CONTAINERS) and not self._is_tree(value):
                    self.weigh(value)

    def _is_tree(self, value: Any) -> bool:
        """True if `value` is a part of the variables that the render got."""
        if self._trees is None:
            self._trees = frozenset(_containers_in(self._inputs))
        return id(value) in self._trees

    def key(self, value: Any) -> Any:
        """Check `value` before it is hashed; returns it."""
        if isinstance(value, tuple):
            self.weigh(value)
        return value

    def searched(self, text: Any, part: Any) -> None:
        """Count an operation that may compare each character of `text` with each character of `part`."""
        if isinstance(text, str) and isinstance(part, str):
            if len(text) * len(part) > MAX_COMPARED:
                raise OverBudget("a search of too long a text in too long a text")
            self.spend(len(text) + len(part))

    def sorted(self, values: Any) -> None:
        """Count an operation that sorts `values`."""
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
        """The concatenation of `pieces`."""
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
            self.expect(6 * (size_of(left) + size_of(right)))  # A text that is marked as safe escapes the other one.
        elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            self.expect(8 * (len(left) + len(right)))
            self.composed = True
        return self.made(left + right)

    def number(self, value: Any) -> Any:
        """Returns `value`. Raises OverBudget if it is an int of more than MAX_BITS bits."""
        if value.__class__ is int and value.bit_length() > MAX_BITS:
            raise OverBudget(f"a number of more than {MAX_BITS} bits")
        return value

    def compose(self, value: Any) -> Any:
        """Count the new list, tuple or dict `value`; returns it."""
        self.holds(value.values() if value.__class__ is dict else value)
        self.hold(32 * len(value))  # This is for numbers: no other code counts them.
        return self.made(value)

    def holds(self, values: Iterable[Any]) -> None:
        """Note that a new container holds `values`."""
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
        """Yield the items, and count one turn for each."""
        for item in items:
            self._work -= work
            if self._work < 0:
                self._look()
            yield item


class Kept(Namespace):
    """A template's namespace. Its values outlive the turns of loops, so it counts them separately."""

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
        # The old value is freed if only this namespace refers to it.
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
    """The result of `getrefcount` for a value that only a dict and a local variable refer to."""
    values = {"one": [0]}
    old = values.get("one")
    return getrefcount(old)


_ALONE = _references()


def attributes_of(namespace: Namespace) -> dict[str, Any]:
    """The members of a namespace."""
    attributes: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return attributes


def _bytes_of(value: Any) -> int:
    """The approximate size of a JSON value in memory, in bytes."""
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
