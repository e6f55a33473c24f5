"""The harness itself: it notices what it is for."""

from __future__ import annotations

import json

import pytest
from harness import GAP_SECONDS, SECRET, House, allowed, expected, percentile, until
from llmcore_devtools import sockets
from llmcore_devtools.faults import fault


def test_a_quiet_neighbour(house: House) -> None:
    with house.neighbour() as neighbour:
        assert house.text([1, 2, 3], 20) == expected([1, 2, 3], 20)
    assert len(neighbour.times) >= 100


def test_an_idle_machine_has_no_slack(pytestconfig: pytest.Config) -> None:
    assert allowed(0.5) == (0.5 if pytestconfig.getoption("--idle", default=False) else 5.0)


def test_a_stalled_neighbour_is_noticed(house: House) -> None:
    with pytest.raises(AssertionError, match="p99"), house.neighbour(events=20, gap=GAP_SECONDS) as neighbour:

        def stalled() -> bool:
            status, _, answer = house.post("/v1/completions", {"prompt": fault("slow"), "max_tokens": 1})
            assert status == 200, answer
            return percentile(neighbour.gaps, 0.9) > GAP_SECONDS

        until(stalled, "one event in ten is late, however many came before")


def test_kv_that_is_held_is_noticed(house: House) -> None:
    with sockets.connect(house.port) as sock:
        sock.sendall(house.request("/v1/completions", {"prompt": [1], "max_tokens": 4000, "stream": True}))
        sockets.read_head(sock)
        until(lambda: house.figures()["batch_current_size"], "figures from after its begin")
        with pytest.raises(AssertionError, match="batch_current_size"):
            house.is_whole(0.5)


def test_a_secret_in_the_log_is_noticed(house: House) -> None:
    house.log_is_clean()
    with house.server.log.open("a") as log:
        log.write(SECRET)
    with pytest.raises(AssertionError, match="holds"):
        house.log_is_clean()
    house.server.log.write_text(house.server.log.read_text().replace(SECRET, ""))


def test_errors_have_one_shape(house: House) -> None:
    status, _, answer = house.post("/v1/completions", {"prompt": fault("tokenize"), "max_tokens": 1})
    assert (status, json.loads(answer)["error"]["type"]) == (500, "server_error")
