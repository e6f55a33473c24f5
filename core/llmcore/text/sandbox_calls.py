"""The calls of chat templates: operators, filters, tests, functions and methods, each within a render's `Budget`.

A single call of a C function cannot be interrupted. So its time and memory are predicted from its arguments. The
tables name the prediction for each function. A template cannot call a method that is not in a table.
"""

from __future__ import annotations

import datetime
import json
import operator
import re
import string
from _string import formatter_field_name_split  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import islice
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.runtime import LoopContext
from jinja2.tests import TESTS as JINJA_TESTS
from jinja2.utils import Cycler, Joiner, _PassArg, pass_context
from markupsafe import EscapeFormatter, Markup

from llmcore.text.render_budget import (
    MAX_BITS,
    STRIDE,
    TURN,
    Budget,
    Kept,
    OverBudget,
    size_of,
    width_of,
)

MAX_RANGE = 100_000
"""Most numbers of a range, as in Jinja's sandbox."""

MAX_PARTS = 16
"""Most names in a filter's attribute, such as the three in "a.b,c"."""

MAX_INDENT = 64
MAX_DIGITS = 400
MAX_SLOW_TEXT = 10_000
"""Most characters of a text for slow filters, for example those with regular expressions, which run uninterrupted."""

_PIECE = 58
"""Bytes of a short text plus its entry in a list."""


class TemplateRefusal(jinja2.TemplateError):
    """Raised when a template refuses the messages with `raise_exception`."""


def _each(names: str, rule: Any) -> dict[str, Any]:
    """A dict with the same rule for each of several names."""
    return dict.fromkeys(names.split(), rule)


# --- operators


def _multiply(budget: Budget, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > 2 * MAX_BITS:
            raise OverBudget(f"a number of more than {MAX_BITS} bits")
        return budget.number(left * right)
    sequence, times = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(times, int):
        if isinstance(sequence, str):
            budget.expect(len(sequence) * width_of(sequence) * max(times, 0))
        elif isinstance(sequence, (list, tuple)):
            budget.expect(8 * len(sequence) * max(times, 0))
            budget.composed = True
    return budget.made(left * right)


def _power(budget: Budget, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
        raise OverBudget(f"a number of more than {MAX_BITS} bits")
    return left**right


_SPECIFIER = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")


def _modulo(budget: Budget, left: Any, right: Any) -> Any:
    if not isinstance(left, str):
        return left % right
    values = right if isinstance(right, tuple) else (right,)
    members = [member for value in values if isinstance(value, dict) for member in value.values()]
    sizes, stars = [0], [0]
    for value in (*values, *members):
        if isinstance(value, int):
            stars.append(abs(value))
        budget.deep(value)
        sizes.append(6 * size_of(value) if isinstance(value, str) else MAX_BITS)
    budget.spend(10 * len(left))
    found = _SPECIFIER.findall(left) if len(left) <= MAX_SLOW_TEXT else [("9" * 9, "")]
    widths = [max(stars) if width == "*" else _number(width) for pair in found for width in pair]
    budget.expect(4 * (len(left) + sum(widths)) + len(found) * max(sizes))
    return budget.made(left % right)


def _number(digits: str) -> int:
    return int(digits[:18] or 0) if digits else 0


def _minus(budget: Budget, left: Any, right: Any) -> Any:
    budget.deep(left, right)
    return budget.number(left - right)


OPERATORS: Mapping[str, Callable[[Budget, Any, Any], Any]] = {
    "*": _multiply,
    "**": _power,
    "%": _modulo,
    "-": _minus,
}

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def compared(budget: Budget, sign: str, left: Any, right: Any) -> Any:
    """The result of `left sign right`. The sign may also be `in` or `not in`."""
    if sign == "in":
        return contains(budget, right, left)
    if sign == "not in":
        return not contains(budget, right, left)
    if left.__class__ is str or right.__class__ is str:
        budget.spend(len(left) if left.__class__ is str else 1)
    elif isinstance(left, Sized):
        budget.spend(50 * len(left))
        budget.deep(left, right)
    return _COMPARE[sign](left, right)


def contains(budget: Budget, where: Any, what: Any) -> bool:
    """The result of `what in where`."""
    _sought(budget, where, what)
    return what in where


def _sought(budget: Budget, where: Any, what: Any) -> None:
    """Count the search of `what` in `where`, before the search."""
    if isinstance(where, str):
        budget.spend(len(where))
    elif isinstance(where, dict):
        budget.key(what)
    elif isinstance(where, Iterable):
        budget.key(what)
        if isinstance(where, Sized):
            size = len(what) if isinstance(what, str) else 0 if isinstance(what, (int, float)) else budget.weigh(what)
            budget.expect_work(len(where) * (50 + size))
        budget.deep(where)


# --- functions


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the environment. `run` takes (budget, arguments...)."""

    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Exists only for `is callable`. The environment calls `run`."""
        raise SecurityError("this function is only for calls in a template")


def call_function(budget: Budget, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of the environment."""
    return function.run(budget, *args, **kwargs)


def _range(budget: Budget, *args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise OverflowError(f"Range too big. The sandbox blocks ranges larger than {MAX_RANGE:,}.")
    return numbers


def _dict(budget: Budget, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    if args and hasattr(args[0], "__len__"):
        budget.expect(100 * len(args[0]))
    budget.composed = True
    budget.deep(*args)
    made: dict[Any, Any] = budget.made(dict(*args, **kwargs))
    return made


def _cycler(budget: Budget, *items: Any) -> Cycler:
    budget.holds(items)
    budget.hold(500 + 40 * len(items))
    return Cycler(*items)


def _raise_exception(budget: Budget, message: str) -> NoReturn:
    raise TemplateRefusal(budget.text(message))


def _strftime_now(budget: Budget, pattern: str) -> str:
    if len(pattern) > 1000:
        raise OverBudget("a date's pattern of more than 1,000 characters")
    return datetime.datetime.now().strftime(pattern)


GLOBALS: Mapping[str, Any] = {
    "range": Function(_range),
    "dict": Function(_dict),
    "namespace": Function(Kept),
    "cycler": Function(_cycler),
    "joiner": Function(lambda budget, sep=", ": Joiner(sep)),
    "raise_exception": Function(_raise_exception),
    "strftime_now": Function(_strftime_now),
}


# --- methods


def _same(text: str, *args: Any, **kwargs: Any) -> int:
    return 3 * size_of(text)  # A change of case turns a few letters into three.


def _nothing(value: Any, *args: Any, **kwargs: Any) -> int:
    return 0


def _padded(text: str, width: Any = 80, fill: Any = " ") -> int:
    return 4 * max(len(text), width) if isinstance(width, int) else 0


def _replaced(text: str, old: Any, new: Any, count: Any = -1) -> int:
    if not (isinstance(old, str) and isinstance(new, str)):
        return 0
    times = text.count(old)
    if isinstance(count, int) and 0 <= count < times:
        times = count
    widest = max(width_of(text), width_of(new))
    return widest * (len(text) + times * len(new))


def _split(text: str, sep: Any = None, maxsplit: Any = -1) -> int:
    pieces = text.count(sep) + 1 if isinstance(sep, str) and sep else len(text) // 2 + 1
    if isinstance(maxsplit, int) and 0 <= maxsplit < pieces:
        pieces = maxsplit + 1
    return size_of(text) + _PIECE * pieces


def _lines(text: str, keepends: Any = False) -> int:
    return size_of(text) + _PIECE * (sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")) + 1)


def _tabs(text: str, tabsize: Any = 8) -> int:
    return 4 * (len(text) + text.count("\t") * abs(tabsize)) if isinstance(tabsize, int) else 0


def _copied(value: Any, *args: Any) -> int:
    return 100 * len(value)


_STRINGS: Mapping[str, Callable[..., int]] = {
    **_each("capitalize casefold lower removeprefix removesuffix swapcase title upper", _same),
    **_each("strip lstrip rstrip partition rpartition", _same),
    **_each("count endswith find index rfind rindex startswith", _nothing),
    **_each("isalnum isalpha isascii isdecimal isdigit isidentifier islower", _nothing),
    **_each("isnumeric isprintable isspace istitle isupper", _nothing),
    **_each("center ljust rjust zfill", _padded),
    "replace": _replaced,
    **dict.fromkeys(("split", "rsplit"), _split),
    "splitlines": _lines,
    "expandtabs": _tabs,
}
_SEARCHES = frozenset({"strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit"})
"""Methods that may compare each character of the text with each character of their argument."""

_METHODS: Mapping[type, Mapping[str, Callable[..., int]]] = {
    str: _STRINGS,
    Markup: _STRINGS,
    dict: {**_each("get items keys values", _nothing), "copy": _copied},
    list: {**_each("count index", _nothing), "copy": _copied},
    tuple: _each("count index", _nothing),
    range: _each("count index", _nothing),
    Cycler: _each("next reset", _nothing),
    LoopContext: {"cycle": _nothing, "changed": _nothing},
}


def call_method(budget: Budget, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a text or a container."""
    owner, name = method.__self__, method.__name__
    kind = owner.__class__
    if name == "join" and isinstance(owner, str):
        return _joined(budget, owner, *args, **kwargs)
    predict = _METHODS.get(kind, {}).get(name)
    if predict is None:
        raise SecurityError(f"{kind.__name__}.{name} cannot be called in a chat template")
    if kind is str or kind is Markup:
        size = predict(owner, *args, **kwargs)
        if size > STRIDE:
            budget.expect(size if kind is str else 6 * size)
        budget.spend(len(owner))
        if name in _SEARCHES:
            for part in (*args, *kwargs.values()):
                budget.searched(owner, part)
    elif kind is dict:
        budget.expect(predict(owner))
        for value in args[:1]:
            budget.key(value)
    elif name == "changed":  # The loop keeps the values for its next turn.
        budget.deep(*args)
        budget.keep(sum(size_of(value) for value in args if isinstance(value, str)))
        budget.floor = budget.held
    elif kind is not Cycler and kind is not LoopContext:
        budget.expect(predict(owner))
        for value in args[:1]:
            _sought(budget, owner, value)
    result = budget.made(method(*args, **kwargs))
    if result.__class__ is list and kind is not list:
        budget.hold(len(owner) + (_PIECE - 8) * len(result))
    return result


def _joined(budget: Budget, separator: str, values: Iterable[Any]) -> str:
    parts = list(values)
    budget.hold(8 * len(parts))
    if isinstance(separator, Markup):
        total = sum(len(part) for part in parts if isinstance(part, str)) + len(separator) * len(parts)
        budget.expect(24 * total)
        return separator.join(parts)
    if any(not isinstance(part, str) for part in parts):
        return separator.join(parts)  # This raises Python's own error.
    total = sum(map(len, parts)) + len(separator) * len(parts)
    if total > STRIDE:
        budget.expect(total * max(map(width_of, (separator, *parts))))
    text: str = budget.made(separator.join(parts))
    return text


class BoundFormat:
    """The method `format` or `format_map` of a text."""

    __slots__ = ("_environment", "_map", "_text")

    def __init__(self, environment: Any, text: str, is_map: bool):
        self._environment, self._text, self._map = environment, text, is_map

    @classmethod
    def of(cls, environment: Any, value: Any) -> BoundFormat | None:
        """A BoundFormat if `value` is one of the two methods, else None."""
        name = getattr(value, "__name__", None)
        if name != "format" and name != "format_map":
            return None
        owner = getattr(value, "__self__", None)
        return cls(environment, owner, name == "format_map") if isinstance(owner, str) else None

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Exists only for `is callable`. The environment calls `run`."""
        raise SecurityError("this method is only for calls in a template")

    def run(self, budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The formatted text."""
        if self._map:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument")
            (kwargs,) = args
            args = ()
        budget.spend(20 * len(self._text))
        kind = type(self._text)
        formatter: _Formatter
        if isinstance(self._text, Markup):
            formatter = _EscapingFormatter(self._environment, budget, escape=self._text.escape)
        else:
            formatter = _Formatter(self._environment, budget)
        return budget.made(kind(formatter.vformat(self._text, args, kwargs)))


def call_format(budget: Budget, method: BoundFormat, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `str.format`."""
    return method.run(budget, args, kwargs)


class _Formatter(string.Formatter):
    """Python's Formatter, but the environment looks up the fields, and they are counted before they are joined."""

    def __init__(self, environment: Any, budget: Budget, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._environment, self._budget = environment, budget

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """See string.Formatter."""
        self._budget.spend()
        first, rest = formatter_field_name_split(field_name)
        found = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            self._budget.spend()
            look_up = self._environment.getattr if is_attribute else self._environment.getitem
            found = look_up(found, name)
        return found, first

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """See string.Formatter."""
        if conversion:
            self._budget.deep(value)
            self._budget.expect(10 * len(value) if isinstance(value, str) else 0)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """See string.Formatter."""
        self._budget.deep(value)
        if len(format_spec) > 1000:
            raise OverBudget("a format of more than 1,000 characters")
        for digits in re.findall(r"\d+", format_spec):
            self._budget.expect(4 * _number(digits))
        made = super().format_field(value, format_spec)
        self._budget.hold(size_of(made))
        return made


class _EscapingFormatter(_Formatter, EscapeFormatter):
    """The formatter of texts that are marked as safe."""


# --- filters


def _leading(func: Any) -> Callable[[Any], tuple[Any, ...]]:
    """A function from the context to the arguments that Jinja passes to `func` before its value."""
    return {
        _PassArg.context: lambda context: (context,),
        _PassArg.eval_context: lambda context: (context.eval_ctx,),
        _PassArg.environment: lambda context: (context.environment,),
        None: lambda context: (),
    }[_PassArg.from_obj(func)]


def _checked(func: Any, check: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja's filter `func`, applied to the value that `check` returns."""
    leading = _leading(func)

    @pass_context
    @wraps(func, assigned=("__name__", "__doc__"), updated=())
    def checked(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context.budget
        budget.spend()
        if args or kwargs:
            budget.takes(*args, *kwargs.values())
        value = check(budget, value, *args, **kwargs)
        return budget.made(func(*leading(context), value, *args, **kwargs))

    return checked


def _of_text(predict: Callable[..., int], *, limit: int | None = None) -> Callable[..., Any]:
    """A check for filters of texts.

    `predict` returns the most bytes that the result may take. `limit`: the most characters of the text.
    """

    def check(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget.deep(value, *args, *kwargs.values())
        if not isinstance(value, str):
            if limit is not None:
                budget.expect(budget.weigh(value) * 100)
            return value
        if limit is not None and len(value) > limit:
            raise OverBudget(f"more than {limit:,} characters in a filter that is slow")
        size = predict(value, *args, **kwargs)
        if size > STRIDE:
            budget.expect(size if value.__class__ is str else 6 * size)
        budget.spend(len(value))
        return value

    return check


def _as_text(predict: Callable[..., int]) -> Callable[..., Any]:
    """A check for filters that convert their value to a text."""
    check = _of_text(predict)

    def checked(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
        return check(budget, value if isinstance(value, str) else budget.text(value), *args, **kwargs)

    return checked


@pass_context
def _trim(context: Any, value: Any, chars: Any = None) -> Any:
    budget: Budget = context.budget
    if value.__class__ is not str:
        value = value if isinstance(value, str) else budget.text(value)
    if chars is not None:
        budget.searched(value, chars)
    trimmed = value.strip(chars)
    return value if trimmed is value else budget.made(trimmed)


def _indented(text: str, width: Any = 4, *args: Any, **kwargs: Any) -> int:
    each = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    return 2 * _lines(text) + 4 * (text.count("\n") + 2) * abs(each)


def _wrapped(
    text: str, width: Any = 79, break_long_words: Any = True, wrapstring: Any = "\n", *args: Any, **kwargs: Any
) -> int:
    return _PIECE * len(text) + (len(text) + 1) * (size_of(wrapstring) if isinstance(wrapstring, str) else 1)


def _truncated(text: str, length: Any = 255, killwords: Any = False, end: Any = "...", leeway: Any = None) -> int:
    return 2 * size_of(text) + (size_of(end) if isinstance(end, str) else 0)


def _times(factor: int) -> Callable[..., int]:
    return lambda text, *args, **kwargs: factor * len(text) + 1000


def _listed(budget: Budget, values: Any) -> Any:
    """`values`, as a list if it is an iterator: deeply nested generators would overflow C's stack."""
    return budget.made(list(values)) if hasattr(values, "__next__") else values


def _parts(*names: Any) -> int:
    """The number of lookups for attributes such as "a.b,c"."""
    return sum(name.count(".") + name.count(",") for name in names if isinstance(name, str)) + 1


def _to_sort(budget: Budget, values: Any, *args: Any, **kwargs: Any) -> Any:
    values = _listed(budget, values)
    budget.composed = True
    budget.sorted(values)
    if isinstance(values, Sized):
        lookups = _parts(*args, *kwargs.values()) * len(values)
        budget.expect_work(500 * lookups)
        budget.hold(100 * lookups)
    return values


def _to_list(budget: Budget, values: Any) -> Any:
    each = 8 if isinstance(values, str) and values.isascii() else 84 if isinstance(values, str) else 40
    if isinstance(values, Sized):
        budget.expect(each * len(values))
        budget.spend(20 * len(values))
        budget.hold((each - 8) * len(values))
        return values
    listed = list(values)
    budget.hold(32 * len(listed))
    return listed


def _to_reverse(budget: Budget, values: Any) -> Any:
    values = _listed(budget, values)
    if isinstance(values, str):
        budget.expect(size_of(values))
    return values


def _one_by_one(budget: Budget, values: Any, *args: Any, **kwargs: Any) -> Any:
    """A check for filters that return a generator. It counts a turn for each value that they read."""
    values = _listed(budget, values)
    budget.hold(1500)  # This is for the generators.
    name = kwargs.get("attribute") or (args[0] if args else "")
    if isinstance(name, str) and len(name) > MAX_PARTS and _parts(name) > MAX_PARTS:
        raise OverBudget(f"an attribute of more than {MAX_PARTS} parts")
    return budget.ticking(values) if values else values


def _in_groups(budget: Budget, values: Any, count: Any, fill_with: Any = None) -> Any:
    values = list(budget.ticking(values))
    budget.hold(1500)
    if isinstance(count, int) and count > MAX_RANGE:
        raise OverBudget(f"more than {MAX_RANGE:,} places to fill")
    budget.composed = True
    budget.hold(8 * (2 * len(values) + (max(count, 0) if isinstance(count, int) else 0)) + 64 * len(values))
    return values


def _hashed(budget: Budget, values: Any, *args: Any, **kwargs: Any) -> Any:
    values = _listed(budget, values)
    budget.weigh(values)
    if _parts(*args, *kwargs.values()) > MAX_PARTS:
        raise OverBudget(f"an attribute of more than {MAX_PARTS} parts")
    budget.hold(1500)
    budget.hold(100 * len(values) if hasattr(values, "__len__") else 0)
    return budget.ticking(values)


def _to_round(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> Any:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{type(value).__name__} is not a number")
    if not isinstance(precision, int) or abs(precision) > MAX_DIGITS:
        raise OverBudget(f"more than {MAX_DIGITS} digits to round to")
    return value


@pass_context
def _string(context: Any, value: Any) -> Any:
    if value.__class__ is str or isinstance(value, str):
        return value
    return context.budget.made(context.budget.text(value))


@pass_context
def _safe(context: Any, value: Any) -> Any:
    return context.budget.made(Markup(value if isinstance(value, str) else context.budget.text(value)))


@pass_context
def _join(context: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    budget: Budget = context.budget
    if attribute is not None:
        value = JINJA_FILTERS["map"](context, _one_by_one(budget, value, attribute=attribute), attribute=attribute)
    texts = [item if item.__class__ is str else str(budget.text(item)) for item in budget.ticking(value)]
    return _joined(budget, str(budget.text(d)), texts)


@pass_context
def _sum(context: Any, value: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    budget: Budget = context.budget
    if attribute is not None:
        value = JINJA_FILTERS["map"](context, _one_by_one(budget, value, attribute=attribute), attribute=attribute)
    if isinstance(start, str):
        raise TypeError("sum() can't sum strings [use ''.join(seq) instead]")
    for item in budget.ticking(value):
        start = budget.add(start, item)
    return start


@pass_context
def _format(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise jinja2.exceptions.FilterArgumentError("can't handle positional and keyword arguments at the same time")
    budget: Budget = context.budget
    return _modulo(budget, value if isinstance(value, str) else budget.text(value), kwargs or args)


@pass_context
def _int(context: Any, value: Any, default: Any = 0, base: int = 10) -> Any:
    return context.budget.number(JINJA_FILTERS["int"](value, default, base))


@pass_context
def _tojson(
    context: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    budget: Budget = context.budget
    budget.spend()
    if separators is not None and [type(separator) for separator in separators] != [str, str]:
        raise TypeError("separators are two texts")
    given = (len(indent) if isinstance(indent, str) else indent or 0, *map(len, separators or ()))
    if max(given) > MAX_INDENT:
        raise OverBudget(f"an indent or a separator of more than {MAX_INDENT} characters")
    encoder = _encoder(bool(ensure_ascii), indent, separators and tuple(separators), bool(sort_keys))
    if indent is None:
        budget.deep(value)
        # A control character becomes six characters. The limit already has room for the client's own input.
        largest = 6 * (size_of(value) if isinstance(value, str) else budget.held)
        if largest > STRIDE:
            budget.expect(largest)
        return str(budget.made(encoder.encode(value)))
    chunks, parts = encoder.iterencode(value), []
    while chunk := list(islice(chunks, 1000)):
        parts.append(budget.concat(chunk))
        budget.spend(1000 * TURN)
    return parts[0] if len(parts) == 1 else budget.concat(parts)


@lru_cache(maxsize=64)
def _encoder(ensure_ascii: bool, indent: Any, separators: Any, sort_keys: bool) -> json.JSONEncoder:
    # Use the standard library's encoder, because templates depend on its ", " and ": ".
    return json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_from_generator
    )


def _from_generator(value: Any) -> list[Any]:
    """A list for JSON, from a generator such as `tools | map(...)`."""
    if isinstance(value, GeneratorType):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


_AS_JINJA = (
    *("abs", "count", "d", "default", "filesizeformat", "first", "float", "items", "last", "length", "random"),
)
"""Filters whose results are not larger than their arguments."""

_CHECKS: Mapping[str, Callable[..., Any]] = {
    **_each("capitalize lower upper", _as_text(_same)),
    "attr": lambda budget, value, name: value,
    **dict.fromkeys(("e", "escape", "forceescape"), _as_text(_times(24))),
    **dict.fromkeys(("title", "wordcount"), _as_text(_times(60))),
    **dict.fromkeys(("striptags", "urlize", "xmlattr", "pprint"), _of_text(_times(40), limit=MAX_SLOW_TEXT)),
    "urlencode": _of_text(_times(12), limit=100 * MAX_SLOW_TEXT),
    "center": _as_text(_padded),
    "replace": lambda budget, value, old, new, count=None: _as_text(_replaced)(
        budget, value, budget.text(old), budget.text(new), count
    ),
    "indent": _of_text(_indented),
    "truncate": _of_text(_truncated),
    "wordwrap": _of_text(_wrapped, limit=MAX_SLOW_TEXT),
    "round": _to_round,
    "list": _to_list,
    "reverse": _to_reverse,
    **_each("sort dictsort groupby min max", _to_sort),
    **_each("map select reject selectattr rejectattr", _one_by_one),
    **dict.fromkeys(("batch", "slice"), _in_groups),
    "unique": _hashed,
}

FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: JINJA_FILTERS[name] for name in _AS_JINJA},
    **{name: _checked(JINJA_FILTERS[name], check) for name, check in _CHECKS.items()},
    "join": _join,
    "sum": _sum,
    "format": _format,
    "int": _int,
    "safe": _safe,
    "string": _string,
    "tojson": _tojson,
    "trim": _trim,
}


# --- tests


def _budgeted(run: Callable[..., Any]) -> Callable[..., Any]:
    """A Jinja test that calls `run` with (budget, value, arguments...)."""

    @pass_context
    def test(context: Any, value: Any, *args: Any) -> Any:
        return run(context.budget, value, *args)

    return test


def _comparison(sign: str) -> Callable[..., Any]:
    compare = _COMPARE.get(sign)

    @pass_context
    def test(context: Any, value: Any, other: Any) -> Any:
        if compare is not None and value.__class__ is str and other.__class__ is str and len(value) < STRIDE:
            return compare(value, other)
        return compared(context.budget, sign, value, other)

    return test


_SIGNS = {
    **{sign: sign for sign in (*_COMPARE, "in")},
    **{"eq": "==", "equalto": "==", "ne": "!=", "gt": ">", "greaterthan": ">", "ge": ">="},
    **{"lt": "<", "lessthan": "<", "le": "<="},
}

TESTS: Mapping[str, Any] = {
    **JINJA_TESTS,
    **{name: _comparison(sign) for name, sign in _SIGNS.items()},
    "filter": _budgeted(lambda budget, value: isinstance(value, str) and value in FILTERS),
    "test": _budgeted(lambda budget, value: isinstance(value, str) and value in TESTS),
    "odd": _budgeted(lambda budget, value: _modulo(budget, value, 2) == 1),
    "even": _budgeted(lambda budget, value: _modulo(budget, value, 2) == 0),
    "divisibleby": _budgeted(lambda budget, value, number: _modulo(budget, value, number) == 0),
    "lower": _budgeted(lambda budget, value: budget.text(value).islower()),
    "upper": _budgeted(lambda budget, value: budget.text(value).isupper()),
}
