"""Line charts as SVG: panels side by side, with a linear x axis and a logarithmic y axis. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 520, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 20, 56, 56
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One chart: lines by name. `y` values must be above 0."""

    x_label: str
    y_label: str
    lines: Mapping[str, Points]


def chart(title: str, panels: Sequence[Panel]) -> str:
    """The SVG document. Panels without a point stay empty."""
    width = _WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" '
        f'viewBox="0 0 {width} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{_HEIGHT}" fill="white"/>',
        _text(width / 2, 20, title, size=14),
    ]
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({index * _WIDTH} 0)">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel) -> Iterator[str]:
    points = [point for line in panel.lines.values() for point in line]
    x_ticks = linear_ticks(max((x for x, _ in points), default=1.0))
    y_ticks = log_ticks(min((y for _, y in points), default=1.0), max((y for _, y in points), default=10.0))
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    bottom, top = math.log10(y_ticks[0]), math.log10(y_ticks[-1])

    def across(x: float) -> float:
        return _LEFT + inner_width * x / x_ticks[-1]

    def up(y: float) -> float:
        return _TOP + inner_height * (1 - (math.log10(y) - bottom) / (top - bottom))

    for x in x_ticks:
        yield _rule(across(x), _TOP, across(x), _TOP + inner_height)
        yield _text(across(x), _TOP + inner_height + 18, f"{x:,g}")
    for y in y_ticks:
        yield _rule(_LEFT, up(y), _LEFT + inner_width, up(y))
        yield _text(_LEFT - 6, up(y) + 4, f"{y:,g}", anchor="end")
    yield _text(_LEFT + inner_width / 2, _HEIGHT - 14, panel.x_label)
    yield _text(16, _TOP + inner_height / 2, panel.y_label, turn=True)
    for index, (name, line) in enumerate(panel.lines.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in line:
            yield f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill="{colour}"/>'
        place = _LEFT + 12 + index * 90
        yield f'<rect x="{place}" y="{_TOP - 20}" width="12" height="12" fill="{colour}"/>'
        yield _text(place + 17, _TOP - 10, name, anchor="start")


def linear_ticks(most: float) -> list[float]:
    """About five round numbers from 0 to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 5.0001)
    return [round(step * i, 10) for i in range(math.ceil(most / step - 1e-9) + 1)]


def log_ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from at most `least` to at least `most`."""
    lowest, highest = math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1
    marks = [round(factor * 10.0**power, 10) for power in range(lowest, highest + 1) for factor in (1, 2, 5)]
    first = max(i for i, mark in enumerate(marks) if mark <= least * 1.0001)
    last = min(i for i, mark in enumerate(marks) if mark >= most * 0.9999 and i > first)
    return marks[first : last + 1]


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{turned}>{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'
