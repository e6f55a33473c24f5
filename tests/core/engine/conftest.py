"""Engines on the fake model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from grouped import ThreadGroup
from llmcore.config import Config
from llmcore.engine import blueprint
from llmcore.engine import llm as llm_module
from llmcore.engine.engine import Engine
from llmcore.engine.llm import LLM
from llmcore.engine.model_runner import ModelRunner, Prepared
from llmcore.registry import loader
from llmcore.registry.registry import Registry
from llmcore.sched.plan import StepPlan, decode, encode
from llmcore_devtools import write_fake_model
from steered import PLUGINS

AHEAD = str(Path(__file__).with_name("ahead_device.py"))

MakeLLM = Callable[..., LLM]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--encode-plans", action="store_true", help="runners get every plan encoded and decoded")
    parser.addoption("--group", type=int, default=1, help="engines are groups of this many ranks")


@pytest.fixture
def encoded_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Between scheduler and runner every plan is encoded and decoded; the bytes of each."""
    prepare: Callable[..., Prepared] = ModelRunner.prepare
    sent: list[int] = []

    def sending(runner: ModelRunner, plan: StepPlan) -> Prepared:
        data = encode(plan)
        sent.append(len(data))
        return prepare(runner, decode(data))

    monkeypatch.setattr(ModelRunner, "prepare", sending)
    return sent


@pytest.fixture(autouse=True)
def _encoded_if_asked(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--encode-plans", default=False):
        request.getfixturevalue("encoded_plans")


class Groups(list[ThreadGroup]):
    """The groups of the engines that a test made, in order. `ranks`: the size of those to come."""

    ranks = 2


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    """Engines that are made are groups of ranks; those that no test broke end in good order."""
    made = Groups()

    def build(config: Config, registry: Registry, progress: Any = None) -> Engine:
        made.append(ThreadGroup(made.ranks))
        return made[-1].build(config, registry, progress)

    monkeypatch.setattr(llm_module, "build_engine", build)
    yield made
    for group in made:
        group.end()


@pytest.fixture(autouse=True)
def _grouped_if_asked(request: pytest.FixtureRequest) -> None:
    ranks = request.config.getoption("--group", default=1)
    if ranks > 1:
        request.getfixturevalue("groups").ranks = ranks


installed = cache(loader.available)
"""What it finds is the same for all of hundreds of engines."""


@pytest.fixture
def make_llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_in_advance: None) -> Iterator[MakeLLM]:
    """`make_llm(ahead=1, granule=4, fake={"faults": {"nan": 3}}, **settings)`; what it makes is closed at the end."""
    monkeypatch.setattr(loader, "available", installed)
    with ExitStack() as stack:

        def make(*, ahead: int = 0, granule: int = 1, fake: dict[str, Any] | None = None, **settings: Any) -> LLM:
            directory = write_fake_model(
                tmp_path / f"model{len(list(tmp_path.iterdir()))}", **{"max_position": 640, **(fake or {})}
            )
            monkeypatch.setattr(blueprint, "settle_granules", lambda build, make, asked: {"kv": asked or granule})
            if ahead:
                settings |= {"plugins": [AHEAD], "device": "cpu-ahead"}
            settings = {"max_total_token_num": 2000, "running_max_req_size": 16, "device": "cpu", **settings}
            if settings["max_total_token_num"] is None:
                del settings["max_total_token_num"]
            return stack.enter_context(LLM(directory, **settings))

        yield make


@pytest.fixture
def steered(make_llm: MakeLLM) -> MakeLLM:
    def make(ahead: int = 0, **more: Any) -> LLM:
        return make_llm(plugins=PLUGINS, device="cpu-ahead" if ahead else "cpu", **more)

    return make
