"""The fault suite's fixtures: `house` is a running test server, whose invariant is checked after every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import KEY, STEP_SECONDS, House
from llmcore_devtools import write_fake_model
from llmcore_devtools.server import serving

MakeHouse = Callable[..., AbstractContextManager[House]]

SETTINGS: dict[str, Any] = {"max_total_token_num": 20_000, "running_max_req_size": 64}


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a longer run is asked for with."""
    parser.addoption("--schemas", type=int, default=600, help="how many schemas row 38 asks for")
    parser.addoption(
        "--idle", action="store_true", help="nothing else works here: answers take no longer than promised"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the harness's SLACK."""
    if config.getoption("--idle", default=False):
        harness.SLACK = 1.0


@contextmanager
def running(
    directory: Path, *, fake: dict[str, Any] | None = None, keys: bool = False, settled: bool = True, **settings: Any
) -> Iterator[House]:
    """A server in `directory`. `fake`: what its model is written with. `keys`: it wants KEY.

    `settled`: it has worked before, as `House.check` needs unless it leaves the processes out.
    """
    fake = {"step_delay": STEP_SECONDS, "all_faults": True, **(fake or {})}
    model = write_fake_model(directory / "fake", **fake)
    # Requests that do not say how tokens are drawn: one that is drawn may be the end, at any time.
    (model / "generation_config.json").write_text('{"do_sample": false}')
    if keys:
        settings["api_keys"] = [KEY, "sk-another-0c1d"]
    with serving(model, faults=bool(fake["all_faults"]), **{**SETTINGS, **settings}) as server:
        house = House(server, KEY if keys else None, settings)
        if settled:
            house.settle()
        yield house


@pytest.fixture(scope="session")
def make_house(tmp_path_factory: pytest.TempPathFactory) -> MakeHouse:
    """`with make_house(httpserver_workers=2, fake={...}, keys=True, **settings) as house:` for other settings."""

    def make(**settings: Any) -> AbstractContextManager[House]:
        return running(tmp_path_factory.mktemp("house"), **settings)

    return make


@pytest.fixture(scope="session")
def common_house(make_house: MakeHouse) -> Iterator[House]:
    """A server with the settings of most modules."""
    with make_house() as house:
        yield house


@pytest.fixture(scope="module")
def module_house(common_house: House) -> House:
    """The module's server; a module may define its own with other settings."""
    return common_house


@pytest.fixture
def house(module_house: House) -> Iterator[House]:
    """The module's server; I0 is checked when the test is over."""
    yield module_house
    module_house.check()
