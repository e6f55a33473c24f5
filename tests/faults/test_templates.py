"""Row 41: a chat template that behaves on "Hello" and attacks on a word: these requests fail, and no others do."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeHouse
from harness import WORKER, House, allowed, percentile, until
from llmcore.api.child_pool import MOST_IDLE

ATTACKS = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "pad": "{{ '%*d' % (messages | length * 999999999, 1) }}",
    "double": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "list": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + [[i] * 1000] %}{% endfor %}",
    "sort": "{{ (['b' ~ said, 'a'] * 2000000) | sort | length }}",
}
"""Each needs the message: Jinja computes what is constant when it compiles a template, and the start would fail."""


@pytest.fixture(scope="module")
def module_house(make_house: MakeHouse, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    template = tmp_path_factory.mktemp("template") / "hostile.jinja"
    said = "{% set said = messages[-1].content %}"
    cases = "".join(f"{{% if '{word}' in said %}}{attack}{{% endif %}}" for word, attack in ATTACKS.items())
    template.write_text(said + cases + "{{ said }}")
    with make_house(chat_template=str(template)) as house:
        yield house


def ask(house: House, text: str) -> tuple[int, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3}
    status, _, answer = house.post("/v1/chat/completions", body)
    return status, json.loads(answer)


@pytest.mark.parametrize("word", ATTACKS)
def test_an_attack_fails_alone(house: House, word: str) -> None:
    pid, cpu = house.processes(), house.worker_cpu()
    with house.neighbour():
        status, body = ask(house, word)
    assert (status, body["error"]["param"]) == (400, "messages")
    assert body["error"]["message"].startswith("--chat_template was stopped: for these messages it takes more than")
    assert house.worker_cpu() - cpu < 1.0
    assert house.processes() == pid


def test_many_at_once_leave_the_others_their_turns(house: House) -> None:
    """They run in processes of their own, and leave threads of the worker for health checks."""
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(ask(house, "loop")[0])) for _ in range(4)]
    late: list[float] = []
    with house.neighbour():
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            began = time.monotonic()
            assert house.get("/health")[0] == 200
            late.append(time.monotonic() - began)
            time.sleep(0.02)
        for thread in threads:
            thread.join()
    assert statuses == [400] * 4
    assert percentile(late, 0.5) < allowed(0.1), late


def renderers(house: House) -> list[Path]:
    """The processes that render templates for the worker, in /proc."""
    worker = house.processes()[WORKER]
    pids = [pid for task in Path(f"/proc/{worker}/task").iterdir() for pid in (task / "children").read_text().split()]
    return [Path("/proc") / pid for pid in pids]


def test_memory_comes_back(house: House) -> None:
    before = house.resident()
    for word in ("double", "pad", "list", "sort"):
        assert ask(house, word)[0] == 400
    assert house.resident() - before < 16 << 20
    assert ask(house, "Hello")[0] == 200
    kept = renderers(house)
    assert 1 <= len(kept) <= MOST_IDLE
    for process in kept:
        assert int(re.search(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())[1]) < 40_000  # type: ignore[index]


def test_a_worker_takes_its_renderers_with_it(house: House) -> None:
    assert ask(house, "Hello")[0] == 200
    worker, kept = house.processes()[WORKER], renderers(house)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not any(process.exists() for process in kept), "the end of what rendered for the worker")
    until(lambda: house.processes().get(WORKER, worker) != worker and house.is_ready(), "another worker")
    assert ask(house, "Hello")[0] == 200


def test_the_template_serves_everybody_else(house: House) -> None:
    status, body = ask(house, "Hello")
    assert (status, body["object"]) == (200, "chat.completion")
