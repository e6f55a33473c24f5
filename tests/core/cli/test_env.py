"""`llmcore env`: what a bug report needs, and nothing secret."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest
from listed import run
from llmcore import __version__
from llmcore.cli.env import DEPENDENCIES, describe
from llmcore_devtools import registry_of


def test_it_describes_llmcore_the_machine_and_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCORE_API_KEYS", "sk-secret")
    facts = json.loads(run("env", "--json").stdout)
    assert facts["llmcore"] == {"version": __version__, "variables set": "LLMCORE_API_KEYS"}
    assert facts["machine"]["python"].startswith(platform.python_version())
    assert facts["machine"]["cores"] >= 1 and re.fullmatch(r"[\d.]+ GiB", facts["machine"]["memory"])
    assert facts["plugins"]["llama"] == f"plugin-llama {__version__}"
    assert "radix" not in facts["plugins"] and facts["failures"] == {}


def test_a_person_reads_the_same_as_json_has() -> None:
    text, facts = run("env").stdout, json.loads(run("env", "--json").stdout)
    assert re.findall(r"^(\w+):$", text, re.M) == list(facts)
    for title in ("llmcore", "packages", "plugins"):
        for name, value in facts[title].items():
            assert re.search(rf"^  {re.escape(name)} +{re.escape(value)}$", text, re.M)


def test_packages_are_named_installed_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcore.cli.env.DEPENDENCIES", (*DEPENDENCIES, "no-such-package"))
    packages = describe(registry_of())["packages"]
    assert re.match(r"\d+\.\d+", packages["click"]) and packages["no-such-package"] == "not installed"
    assert set(packages) > set(DEPENDENCIES)


DEVICES = """
from llmcore.api import DeviceSpec, hookimpl


def here():
    return None


def absent():
    return "there is none"


def broken():
    raise OSError("the driver is broken")


@hookimpl
def register_devices():
    for name in ("here", "absent", "broken"):
        yield DeviceSpec(name=name, make="m:m", available=f"{__name__}:{name}", named="m:n")
"""


def test_a_device_is_available_or_the_reason_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probed.py").write_text(DEVICES)
    monkeypatch.setenv("LLMCORE_PLUGINS", str(tmp_path / "probed.py"))
    devices = json.loads(run("env", "--json").stdout)["devices"]
    assert {name: devices[name] for name in ("here", "absent", "broken")} == {
        "here": "available",
        "absent": "not available: there is none",
        "broken": "failed: OSError: the driver is broken",
    }
