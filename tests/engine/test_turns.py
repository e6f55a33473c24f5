"""Places for making logits processors: shared among clients, with some that large arguments cannot hold."""

from __future__ import annotations

import random

import pytest
from llmcore.engine.turns import LARGE_BYTES, MOST_LARGE, MOST_OF_A_CLIENT, PLACES, Turns

SMALL, LARGE = LARGE_BYTES, LARGE_BYTES + 1


def taken(turns: Turns[str], most: int = 99) -> list[str]:
    """What gets a place now, in order."""
    found: list[str] = []
    while len(found) < most and (what := turns.take()) is not None:
        found.append(what)
    return found


def waiting(*what: tuple[str, int, int]) -> Turns[str]:
    turns: Turns[str] = Turns()
    for name, client, size in what:
        turns.wait(name, client, size)
    return turns


def test_one_client_leaves_a_place_to_others() -> None:
    turns = waiting(*((f"a{i}", 1, SMALL) for i in range(9)))
    assert taken(turns) == [f"a{i}" for i in range(MOST_OF_A_CLIENT)]
    turns.wait("b", 2, SMALL)
    assert taken(turns) == ["b"]
    assert turns.leave("b") and not turns.leave("b")
    assert taken(turns) == []
    assert turns.leave("a1") and taken(turns) == [f"a{MOST_OF_A_CLIENT}"]


def test_small_ones_do_not_wait_for_large_ones() -> None:
    turns = waiting(*((f"large{i}", i, LARGE) for i in range(9)))
    assert taken(turns) == [f"large{i}" for i in range(MOST_LARGE)]
    turns.wait("small", 1, SMALL)
    assert taken(turns) == ["small"]
    turns.leave("large0")
    assert taken(turns) == [f"large{MOST_LARGE}"]


def test_small_and_large_ones_of_one_client_alternate() -> None:
    turns = waiting(*((f"large{i}", 1, LARGE) for i in range(9)))
    assert taken(turns) == ["large0", "large1"]
    for i in range(4):
        turns.wait(f"small{i}", 1, SMALL)
    for ended, began in (("large0", "small0"), ("large1", "large2"), ("small0", "small1"), ("small1", "large3")):
        turns.leave(ended)
        assert taken(turns) == [began]


def test_whose_turn_was_longest_ago_comes_first() -> None:
    turns = waiting(*((f"a{i}", 1, SMALL) for i in range(9)), ("b0", 2, SMALL), ("b1", 2, SMALL), ("c0", 3, SMALL))
    assert taken(turns) == ["a0", "b0", "c0"]
    for name in ("a0", "b0", "c0"):
        turns.leave(name)
    assert taken(turns) == ["a1", "b1", "a2"]


def test_a_client_that_comes_late_is_next() -> None:
    """However many others wait, and however often they had a turn."""
    turns = waiting(*((f"{client}.{i}", client, SMALL) for client in (1, 2) for i in range(50)))
    placed = taken(turns)
    for _ in range(20):
        turns.leave(placed.pop(0))
        placed += taken(turns)
    turns.wait("late", 3, SMALL)
    turns.leave(placed.pop(0))
    assert taken(turns) == ["late"]


@pytest.mark.parametrize("seed", range(5))
def test_places_are_never_more_and_nobody_is_forgotten(seed: int) -> None:
    draw, turns = random.Random(seed), Turns[str]()
    sizes: dict[str, tuple[int, int]] = {}
    placed: list[str] = []
    served: list[str] = []
    for n in range(400):
        if draw.random() < 0.6:
            sizes[f"{n}"] = draw.randrange(4), draw.choice((SMALL, LARGE))
            turns.wait(f"{n}", *sizes[f"{n}"])
        elif placed:
            turns.leave(placed.pop(draw.randrange(len(placed))))
        new = taken(turns)
        placed += new
        served += new
        assert len(placed) <= PLACES
        assert sum(sizes[name][1] == LARGE for name in placed) <= MOST_LARGE
        assert all(sum(sizes[name][0] == client for name in placed) <= MOST_OF_A_CLIENT for client in range(4))
    while placed:
        turns.leave(placed.pop())
        new = taken(turns)
        placed += new
        served += new
    assert sorted(served) == sorted(sizes)
    assert not turns._clients
