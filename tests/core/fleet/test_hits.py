"""The table of prompts that places have: chunks of ids, and what it finds beside a record of all that was sent."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from llmcore.fleet.hits import CHUNK, Hits, chunks_of


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


def test_it_forgets_what_a_place_was_sent_longest_ago() -> None:
    hits = Hits()
    hits.sent("a", [1, 2, 3], kv=4 * CHUNK)
    hits.sent("b", [1, 2, 3], kv=4 * CHUNK)
    hits.sent("a", [7], kv=4 * CHUNK)
    hits.sent("a", [1], kv=4 * CHUNK)
    hits.sent("a", [8, 9], kv=4 * CHUNK)
    assert hits.found([1, 2, 3]) == {"a": CHUNK, "b": 3 * CHUNK}, "3 and 2, the end of the oldest prompt, went first"
    assert hits.found([7]) == {"a": CHUNK} and hits.found([8, 9]) == {"a": 2 * CHUNK}
    assert len(hits) == 6
    hits.sent("a", [10, 11, 12, 13, 14], kv=4 * CHUNK)
    assert hits.found([10, 11, 12, 13, 14]) == {"a": 4 * CHUNK}, "a prompt's beginning goes last"


def test_a_place_that_does_not_tell_its_size_gets_its_share() -> None:
    hits = Hits(most=6)
    hits.sent("a", [1, 2, 3, 4, 5, 6, 7])
    assert hits.found([1, 2, 3, 4, 5, 6, 7]) == {"a": 6 * CHUNK}
    hits.sent("b", [1, 2, 3, 4], kv=100 * CHUNK)
    assert hits.found([1, 2, 3, 4]) == {"a": 4 * CHUNK, "b": 3 * CHUNK}, "one that is larger, too"
    hits.sent("a", [1])
    assert hits.found([1, 2, 3, 4]) == {"a": 3 * CHUNK, "b": 3 * CHUNK}


def test_places_that_come_and_go_leave_nothing() -> None:
    hits = Hits()
    hits.sent("stays", [1])
    for number in range(100):
        hits.sent(f"guest-{number}", [1, number + 2])
        assert hits.found([1, number + 2]) == {"stays": CHUNK, f"guest-{number}": 2 * CHUNK}
        hits.lost(f"guest-{number}")
    assert hits.found([1]) == {"stays": CHUNK}
    assert len(hits) == 1 and len(hits._names) == 2, "a guest's number goes to the next"
    hits.lost("never seen")
