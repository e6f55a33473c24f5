"""llmcore.fleet.destinations: what was sent from here counts at once, what others sent when the place tells of it."""

from __future__ import annotations

import threading

import numpy as np
from llmcore.fleet.destinations import KEY_TOKENS, LATENCIES, Destination, Stay, arrival_of

LOCK = threading.Lock()


def test_a_stay_counts_until_it_ends() -> None:
    place = Destination()
    one, two = Stay(place, 100, LOCK), Stay(place, 7, LOCK)
    assert (place.requests, place.waiting) == (2, 107)
    one.answered()
    one.answered()
    assert (place.requests, place.waiting) == (2, 7)
    one.leave(whole=True)
    two.leave(whole=False)
    assert (place.requests, place.waiting, len(place.latencies)) == (0, 0, 1)
    for _ in range(2 * LATENCIES):
        Stay(place, 1, LOCK).leave(whole=True)
    assert len(place.latencies) == LATENCIES


def test_what_others_sent_is_what_it_tells_without_what_was_sent_from_here() -> None:
    place = Destination()
    Stay(place, 100, LOCK)
    place.told(4, 250, (30, 90))
    found = place.candidate("a", 64, 2.0)
    assert (found.name, found.hit, found.speed) == ("a", 64, 2.0)
    assert (found.requests, found.waiting, found.kv_live, found.kv_total) == (4, 250, 100, 90)
    Stay(place, 50, LOCK)
    assert (place.candidate("a", 0).requests, place.candidate("a", 0).waiting) == (5, 300)
    place.told(0, 0, (0, 90))
    assert place.others == (0, 0, 0), "it has not heard of them yet"


def test_what_another_sender_tells_of_counts_until_the_place_tells() -> None:
    place = Destination()
    place.told(1, 10, (10, 90))
    place.shared(100)
    place.shared(0)
    assert place.others == (3, 110, 110)
    place.told(2, 0, (60, 90))
    assert place.others == (2, 0, 60)


def test_requests_that_begin_alike_have_one_key() -> None:
    ids = np.arange(2 * KEY_TOKENS, dtype=np.int32)
    other = ids.copy()
    other[KEY_TOKENS] = 0
    assert arrival_of(ids) == arrival_of(other) and arrival_of(ids).tokens == 2 * KEY_TOKENS
    other[KEY_TOKENS - 1] = 0
    assert arrival_of(ids).key != arrival_of(other).key
    assert arrival_of(ids, b"x").key != arrival_of(ids).key
