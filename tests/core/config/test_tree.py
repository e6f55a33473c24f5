"""The tree of settings: its defaults, and the sections of plugins beside it."""

from __future__ import annotations

from dataclasses import make_dataclass

import msgspec
import pytest
from llmcore.config import (
    Config,
    make_config,
    option,
    options_of,
    resolve_config,
    settings,
)
from site_settings import Site, make


def test_defaults_are_those_of_the_tree() -> None:
    assert resolve_config({}, {}, {})[0] == Config()


@pytest.mark.parametrize(
    ("name", "ratio", "meant"),
    [
        (None, None, "past_future"),
        ("capped", None, "capped"),
        (None, 0.0, "conservative"),
        (None, 0.5, "capped"),
        ("capped", 0.5, "capped"),
    ],
)
def test_ratio_and_estimator_agree(name: str | None, ratio: float | None, meant: str) -> None:
    config = make_config(length_estimator=name, router_token_ratio=ratio)
    assert config.scheduling.estimator == meant


def test_a_section_may_have_the_name_of_one_of_core_or_of_another_plugin() -> None:
    classes = []
    for field_name in ("colour", "size"):
        fields = [(field_name, str, option("any", "Help."))]
        classes.append(make_dataclass("Model", fields, frozen=True, kw_only=True))
        classes[-1].__module__ = f"plugin_{field_name}"
    extra = [spec for one in classes for spec in options_of(one)]
    config = make_config(extra, colour="red", size="large", data_type="f32")
    assert [config.section(one) for one in classes] == [classes[0](colour="red"), classes[1](size="large")]
    assert config.model.data_type == "f32"
    assert len({setting.group for setting in settings(extra)}) == 5 + 2


def test_a_section_has_the_values_of_its_fields() -> None:
    config = make(server_port="9", budget="32k", cut="None", title="a,b", api_keys=["k"])
    site = config.section(Site)
    assert site == Site(port=9, budget=32_000, title=("a", "b"), api_keys=("k",))
    assert config.section(Site) is site
    assert Config().section(Site) == Site()
    assert make(cut="head").section(Site).cut == "head"


def test_a_config_that_was_sent_has_its_sections() -> None:
    config = make(title="a,b", port=5)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config)
    assert sent == config and sent.section(Site) == config.section(Site)
