"""Sampling options, shared by `chat` and `generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")


def sampling_options(function: F) -> F:
    """`--max_new_tokens`, `--temperature`, `--top_p`, `--top_k`, `--typical_p`, `--seed`, `--stop`.

    Absent ones are None or ().
    """
    options = (
        click.option(
            "--max_new_tokens", "--max-new-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens."
        ),
        click.option("--temperature", type=click.FloatRange(min=0), help="0: always the likeliest token."),
        click.option("--top_p", "--top-p", type=click.FloatRange(0, 1), help="Nucleus to draw from (0: greedy)."),
        click.option("--top_k", "--top-k", type=click.IntRange(min=0), help="Draw from the k likeliest (0: all)."),
        click.option(
            "--typical_p", "--typical-p", type=click.FloatRange(0, 1, min_open=True), help="Draw what is typical."
        ),
        click.option("--seed", type=click.IntRange(min=0), help="The same seed gives the same answer."),
        click.option("--stop", multiple=True, help="End an answer at this text; may be repeated."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def from_model(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults of the chosen generation config."""
    return {name: generation[name] for name in _NUMBERS if isinstance(generation.get(name), (int, float))}
