"""The table of prompts that places have: chunks of ids, and what it finds beside a record of all that was sent."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from llmcore.fleet.hits import CHUNK, LOST, Hits, chunks_of


def test_a_chunk_stands_for_all_before_it() -> None:
    ids = np.arange(3 * CHUNK + 5, dtype=np.int32)
    chunks = chunks_of(ids)
    assert len(set(chunks)) == len(chunks) == 3, "the last five ids are no whole chunk"
    assert chunks_of(ids[: 2 * CHUNK]) == chunks[:2]
    other = ids.copy()
    other[0] += 1
    assert not set(chunks_of(other)) & set(chunks)
    assert not set(chunks_of(ids, b"tenant")) & set(chunks)
    assert chunks_of(ids[: CHUNK - 1]) == []


def test_chunks_do_not_depend_on_how_ids_lie_in_memory() -> None:
    ids = np.arange(4 * CHUNK, dtype=np.int32)
    assert chunks_of(ids[::2]) == chunks_of(ids[::2].copy())


class Oracle:
    """Every prompt that each place was sent since it came."""

    def __init__(self) -> None:
        self.prompts: dict[str, list[list[int]]] = {}

    def found(self, chunks: list[int]) -> dict[str, int]:
        """By comparison with each prompt."""
        longest: dict[str, int] = {}
        for place, prompts in self.prompts.items():
            for prompt in prompts:
                same = 0
                while same < min(len(prompt), len(chunks)) and prompt[same] == chunks[same]:
                    same += 1
                longest[place] = max(longest.get(place, 0), same * CHUNK)
        return {place: tokens for place, tokens in longest.items() if tokens}


def prompt(random: Random) -> list[int]:
    """Chunks of a prompt. A chunk's number names all chunks before it, as a hash does."""
    made, number = [], 0
    for _ in range(random.randrange(6)):
        number = number * 3 + random.randrange(1, 3)
        made.append(number)
    return made


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_an_oracle_finds(seed: int) -> None:
    random, hits, oracle = Random(seed), Hits(), Oracle()
    for step in range(2_000):
        place = f"place-{random.randrange(8)}" if random.random() < 0.8 else f"guest-{step}"
        if random.random() < 0.3:
            hits.lost(place)
            oracle.prompts.pop(place, None)
        else:
            sent = prompt(random)
            hits.sent(place, sent)
            oracle.prompts.setdefault(place, []).append(sent)
        if place.startswith("guest") and random.random() < 0.9:
            hits.lost(place)
            oracle.prompts.pop(place, None)
        asked = prompt(random)
        assert hits.found(asked) == oracle.found(asked)


def test_it_forgets_what_was_sent_longest_ago() -> None:
    hits = Hits(most=4)
    hits.sent("a", [1, 2, 3])
    hits.sent("b", [7])
    hits.sent("a", [1])
    hits.sent("b", [8, 9])
    assert len(hits) == 4
    assert hits.found([1, 2, 3]) == {"a": CHUNK}, "1 was sent again; 3, the end of the oldest prompt, went first"
    assert hits.found([7]) == {"b": CHUNK}
    assert hits.found([8, 9]) == {"b": 2 * CHUNK}


def test_places_that_come_and_go_leave_nothing() -> None:
    hits = Hits()
    hits.sent("stays", [1])
    for number in range(10 * LOST):
        hits.sent(f"guest-{number}", [1, number + 2])
        hits.lost(f"guest-{number}")
    assert hits.found([1]) == {"stays": CHUNK}
    assert len(hits) <= LOST + 4, "the chunks of guests are swept"
    hits.lost("never seen")
