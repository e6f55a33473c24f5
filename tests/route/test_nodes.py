"""The choice of a node."""

from __future__ import annotations

from typing import Any

import pytest
from llmcore.api import RequestError
from llmcore_route.addresses import Place
from llmcore_route.nodes import Node, Nodes
from llmcore_route.prompts import wish_of
from routed import First

BODY = b'{"model": "m", "prompt": "' + b"x" * 1024 + b'"}'


def two(**more: Any) -> tuple[Nodes, First, list[Node]]:
    balancer = First()
    nodes = Nodes(balancer)
    found = [nodes.add(Node(f"http://{name}", Place(False, name, 80), ("m",), more.get(name))) for name in ("a", "b")]
    for node in found:
        nodes.succeeded(node)
    return nodes, balancer, found


def test_a_node_has_what_was_sent_there_until_it_is_out() -> None:
    nodes, balancer, (first, _) = two()
    wish = wish_of(BODY)
    assert wish.arrival.tokens == 256
    stay = nodes.take(wish)
    assert (first.requests, first.waiting) == (1, 256)
    again = nodes.take(wish)
    assert [place.hit for place in balancer.asked[1][1]] == [256, 0]
    assert (first.requests, first.waiting) == (2, 256)
    stay.answered()
    stay.leave(whole=True)
    again.leave(whole=False)
    assert (first.requests, first.waiting, len(first.latencies)) == (0, 0, 1)
    for _ in range(2):
        nodes.failed(first, "no")
    nodes.succeeded(first)
    nodes.take(wish)
    assert [place.hit for place in balancer.asked[2][1]] == [0, 0]


def test_a_node_has_no_more_than_its_kv_cache_holds() -> None:
    nodes, balancer, (first, _) = two()
    nodes.succeeded(first, {"kv_total": 300})
    for body in (BODY, BODY.replace(b"x", b"y"), BODY):
        nodes.take(wish_of(body))
    assert [places[0].hit for _, places in balancer.asked] == [0, 0, 0], "the second prompt took the first one's place"
    nodes.take(wish_of(BODY))
    assert balancer.asked[3][1][0].hit == 256


def test_speeds_count_beside_each_other() -> None:
    nodes, balancer, _ = two(a=30.0, b=10.0)
    nodes.take(wish_of(BODY))
    assert [place.speed for place in balancer.asked[0][1]] == [1.5, 0.5]
    nodes, balancer, _ = two(a=30.0)
    nodes.take(wish_of(BODY))
    assert [place.speed for place in balancer.asked[0][1]] == [1.0, 1.0]


def test_what_others_sent_counts_beside_what_was_sent_from_here() -> None:
    nodes, balancer, (first, _) = two()
    stay = nodes.take(wish_of(BODY))
    nodes.succeeded(first, {"running": 4, "waiting": 1, "waiting_tokens": 300, "kv_live": 1_000, "kv_total": 2_000})
    nodes.take(wish_of(BODY.replace(b"x", b"y")))
    stay.leave(whole=True)
    nodes.take(wish_of(b""))
    _, (while_there, _), (after, _) = (places for _, places in balancer.asked)
    assert (while_there.requests, while_there.waiting, while_there.kv_live) == (5, 300, 1_000)
    assert (after.requests, after.waiting, after.kv_live, after.kv_total) == (5, 300, 1_000, 2_000)


def test_nothing_is_taken_at_the_end() -> None:
    nodes, _, _ = two()
    assert nodes.ready
    nodes.close()
    assert not nodes.ready
    with pytest.raises(RequestError, match="shutting down"):
        nodes.take(wish_of(BODY))
