"""Workloads of benchmarks: pairs of lengths, and new random prompts. No torch."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llmcore.api.errors import ConfigError

Lengths = tuple[int, int]
"""(prompt, answer) of one request, in tokens."""

LOWEST_ID, HIGHEST_ID = 10, 99_999
"""Prompts hold ids between these, within the vocabulary. Special tokens are mostly outside."""

_FORMS = "write chat:N, or fixed:N,PROMPT,ANSWER"


@dataclass(frozen=True)
class Workload:
    """Requests by their lengths, in the order in which they are sent."""

    name: str
    lengths: tuple[Lengths, ...]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(prompt for prompt, _ in self.lengths)

    @property
    def output_tokens(self) -> int:
        """Answer tokens of all requests."""
        return sum(output for _, output in self.lengths)

    def cut(self, n: int) -> Workload:
        """The first `n` requests. If there are fewer, they repeat."""
        return Workload(self.name, tuple(self.lengths[i % len(self.lengths)] for i in range(n)))


def chat(n: int, seed: int = 7) -> Workload:
    """Conversations: log-normal lengths, prompts of 8 to 2,048 tokens (mean 218), answers of 8 to 1,024 (191)."""
    draw = random.Random(seed).lognormvariate

    def length(mu: float, sigma: float, most: int) -> int:
        return int(min(max(draw(mu, sigma), 8), most))

    return Workload(f"chat:{n}", tuple((length(4.8, 1.1, 2048), length(4.95, 0.9, 1024)) for _ in range(n)))


def fixed(n: int, prompt: int, output: int) -> Workload:
    """`n` requests of the same lengths."""
    return Workload(f"fixed:{n},{prompt},{output}", ((prompt, output),) * n)


def parse_workload(text: str) -> Workload:
    """chat:1000, or fixed:512,1024,128. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    try:
        numbers = [int(number) for number in rest.split(",")]
    except ValueError as error:
        raise ConfigError(f"--workload {text!r} is none: {_FORMS}.") from error
    if min(numbers) >= 1:
        if kind == "chat" and len(numbers) == 1:
            return chat(numbers[0])
        if kind == "fixed" and len(numbers) == 3:
            return fixed(*numbers)
    raise ConfigError(f"--workload {text!r} is none: {_FORMS}.")


def read_lengths(path: Path, n: int, seed: int) -> Workload:
    """`n` pairs drawn from a CSV file whose columns `prompt...` and `output...` hold tokens. Raises ConfigError."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--lengths {path}: {error}") from error
    columns = [_column(rows[0] if rows else [], name, path) for name in ("prompt", "output")]
    pairs: list[Lengths] = []
    for line, row in enumerate(rows[1:], 2):
        try:
            prompt, output = (int(row[column]) for column in columns)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"--lengths {path}, line {line}: two whole numbers are needed, not {row}") from error
        if min(prompt, output) < 1:
            raise ConfigError(f"--lengths {path}, line {line}: lengths are at least 1, not {row}")
        pairs.append((prompt, output))
    if not pairs:
        raise ConfigError(f"--lengths {path} holds no pair of lengths.")
    return Workload(path.name, tuple(random.Random(seed).choices(pairs, k=n)))


def _column(header: Sequence[str], name: str, path: Path) -> int:
    found = [index for index, title in enumerate(header) if title.strip().startswith(name)]
    if len(found) != 1:
        raise ConfigError(f"--lengths {path}: the first line must name one column `{name}`, it says {list(header)}")
    return found[0]


class Prompts:
    """Random prompts, different in every run and every process, so that no prefix cache has them."""

    def __init__(self, vocab_size: int) -> None:
        self._draw = np.random.default_rng()
        self._high = min(HIGHEST_ID, vocab_size - 1)
        self._low = min(LOWEST_ID, self._high)

    def draw(self, length: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """[length] ids."""
        return self._draw.integers(self._low, self._high, length, np.int32, endpoint=True)
