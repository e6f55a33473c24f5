"""What befalls all processes of a server at once: signals of service managers and terminals, time that stands still.

Rows 60 and 61.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from conftest import MakeHouse
from harness import PATIENCE, House, until
from test_processes import AT_ONCE, ended, is_ready, rest, streams


def signal_all(house: House, number: signal.Signals, *, supervisor_first: bool = False) -> None:
    """As systemd does with every process of a service, in whatever order."""
    pids = [*house.server.children().values(), house.server.process.pid]
    for pid in reversed(pids) if supervisor_first else pids:
        os.kill(pid, number)


@pytest.mark.parametrize(("number", "first"), [("SIGTERM", False), ("SIGTERM", True), ("SIGINT", False)])
def test_a_signal_to_everybody_lets_streams_finish(make_house: MakeHouse, number: str, first: bool) -> None:  # row 61
    with make_house(settled=False, drain_timeout=120, httpserver_workers=2) as house:
        children = house.server.children()
        with streams(house, 10, 150) as socks:
            signal_all(house, signal.Signals[number], supervisor_first=first)
            data = [rest(sock) for sock in socks]
        assert all(b"[DONE]" in answer and b'"error"' not in answer for answer in data)
        assert house.server.process.wait(PATIENCE) == 0
        assert all(ended(pid) for pid in children.values())
        log = house.server.log.read_text()
    assert "Traceback" not in log and "ERROR" not in log, log


def test_the_second_sigterm_to_every_process_ends_all_now(make_house: MakeHouse) -> None:  # row 61
    with make_house(settled=False, drain_timeout=120) as house, streams(house, 3) as socks:
        signal_all(house, signal.SIGTERM)
        until(lambda: not is_ready(house), "draining")
        start = time.monotonic()
        signal_all(house, signal.SIGTERM)
        assert house.server.process.wait(PATIENCE) == 0
        assert time.monotonic() - start < AT_ONCE
        assert not any(b"[DONE]" in rest(sock) for sock in socks)


def test_children_heed_no_signal_of_the_outside(make_house: MakeHouse) -> None:  # row 61
    with make_house() as house:
        children = house.server.children()
        for pid in children.values():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                os.kill(pid, number)
        house.check()
        assert house.server.children() == children


def test_a_server_that_ends_is_not_ended_by_further_signals(make_house: MakeHouse) -> None:  # row 61
    with make_house(settled=False) as house:
        while house.server.process.poll() is None:
            house.server.process.send_signal(signal.SIGTERM)
            time.sleep(0.002)
        assert house.server.process.returncode == 0


def test_sigquit_drains(make_house: MakeHouse) -> None:  # row 61
    with make_house(settled=False, drain_timeout=120) as house, streams(house, 2, 150) as socks:
        house.server.process.send_signal(signal.SIGQUIT)
        assert all(b"[DONE]" in rest(sock) for sock in socks)
        assert house.server.process.wait(PATIENCE) == 0


def test_signals_without_a_meaning_do_nothing(make_house: MakeHouse) -> None:  # row 61
    with make_house() as house:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            house.server.process.send_signal(number)
        house.check()
        assert house.server.stop() == 0


@pytest.mark.slow
def test_nobody_is_killed_for_time_that_stood_still_for_all(make_house: MakeHouse) -> None:  # row 60
    """A container that was paused, a virtual machine that was moved, a laptop that slept."""
    with make_house(watchdog_timeout=2, httpserver_workers=2) as house:
        children = house.server.children()
        with streams(house, 4, 500) as socks:
            signal_all(house, signal.SIGSTOP, supervisor_first=True)
            time.sleep(3.0)
            signal_all(house, signal.SIGCONT, supervisor_first=True)
            assert all(b"[DONE]" in rest(sock) for sock in socks)
        time.sleep(1.0)  # whoever is to be killed is by now
        assert house.server.children() == children
        assert "is killed" not in house.server.log.read_text()
        house.check()


def test_who_hangs_after_such_a_time_is_killed_all_the_same(make_house: MakeHouse) -> None:  # row 60
    with make_house(settled=False, watchdog_timeout=2) as house:
        children = house.server.children()
        with streams(house, 2):
            signal_all(house, signal.SIGSTOP, supervisor_first=True)
            time.sleep(3.0)
            os.kill(house.server.process.pid, signal.SIGCONT)
            assert house.server.process.wait(PATIENCE) == 1
        assert "finished no step for 2 s and is killed" in house.server.log.read_text()
        assert all(ended(pid) for pid in children.values())
