"""Models by name in real commands and on a real server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner
from fake_hub import COMMIT, FakeHub, Handler
from hub_client import MODEL, WEIGHTS
from llmcore import LLM
from llmcore.api import ConfigError
from llmcore.api.protocols import Int32, Int64
from llmcore.builtin.radix import RadixCache
from llmcore.cli import root

TOKEN = "hf_Topsecret1"
PLUGINS = "llama,hub"


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """The variables that an operator sets."""
    theirs = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    return {**theirs, "LLMCORE_PLUGINS": PLUGINS, "OMP_NUM_THREADS": "1"}


def start(environment: Mapping[str, str], *args: str) -> subprocess.Popen[str]:
    """A command."""
    command = [sys.executable, "-m", "llmcore.cli", *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code and its output."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


# --- commands --------------------------------------------------------------------------------------------------


def test_two_pulls_share_a_cache(hub: FakeHub, environment: dict[str, str]) -> None:
    both = [start(environment, "pull", MODEL) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        (first, path, told), (second, same, other) = threads.map(ended, both)
    assert (first, second, path) == (0, 0, same)
    assert sorted(hub.bodies()) == sorted({*hub.bodies()}), "every file came once"
    assert "look up...\n" in told and "look up...\n" in other and TOKEN not in told + other
    assert "verify...\n" in told + other, "a pull that starts later finds the model verified"
    listed = CliRunner().invoke(root, ["models", "--cached", "--json", "--plugins", "hub"], env=environment)
    (row,) = json.loads(listed.stdout)
    assert (row["repository"], row["commit"], row["branches"]) == (MODEL, COMMIT, ["main"])
    assert row["path"] == path.strip() and Path(row["path"], WEIGHTS).is_file()


@pytest.mark.parametrize("name", ["./model", "model", "org/name/x/y"])
def test_only_names_are_pulled(environment: dict[str, str], name: str) -> None:
    done = CliRunner().invoke(root, ["pull", name], env=environment)
    assert isinstance(done.exception, ConfigError) and "is no name of a model; write org/name" in str(done.exception)


def test_a_plan_fetches_no_weights(hub: FakeHub, environment: dict[str, str]) -> None:
    done = CliRunner().invoke(root, ["plan", MODEL, "--device", "cpu"], env=environment, catch_exceptions=False)
    assert "20 F32 tensors" in done.stdout
    assert all(asked.range for asked in hub.asked if asked.path.endswith(WEIGHTS))
    explained = CliRunner().invoke(root, ["kernels", "rms_norm", "--model", MODEL, "--device", "cpu"], env=environment)
    assert explained.exit_code == 0 and "rms_norm (size=32)" in explained.stdout


def test_a_mistyped_path_names_both_readings(environment: dict[str, str]) -> None:
    done = CliRunner().invoke(root, ["plan", "models/lama"], env=environment)
    assert str(done.exception) == (
        "--model_dir models/lama is no path on this machine, and as a name: the hub has no model models/lama; check "
        "the name, or set HF_TOKEN if the model is private"
    )


def test_without_the_plugin_a_name_is_an_error_that_says_so(environment: dict[str, str]) -> None:
    done = CliRunner().invoke(root, ["plan", MODEL, "--plugins=-hub"], env=environment)
    assert "no plugin is active that fetches a model of this name; check the path, or: " in str(done.exception)


# --- in this process -------------------------------------------------------------------------------------------


def test_the_commit_is_part_of_the_prefix_caches_salt(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts, match = set[bytes](), RadixCache.match

    def recording(cache: RadixCache, salt: bytes, content: Int64) -> Int32:
        salts.add(salt)
        return match(cache, salt, content)

    monkeypatch.setattr(RadixCache, "match", recording)
    options: dict[str, Any] = {"hf_endpoint": hub.url, "download_dir": str(tmp_path / "models"), "device": "cpu"}
    fingerprints = []
    for commit in (COMMIT, "b" * 40):
        hub.repositories[MODEL].commit = commit
        with LLM(MODEL, plugins=PLUGINS.split(","), max_total_token_num=200, **options) as llm:
            assert len(llm.generate([[5, 6, 7]], max_new_tokens=2, ignore_eos=True)[0].token_ids) == 2
            assert ("revision", f"{MODEL}@{commit}") in llm.facts.report
            assert llm.config.model.model_name == (MODEL,)
            fingerprints.append(llm.facts.fingerprint)
    assert len(salts) == len({*fingerprints}) == 2
    assert (tmp_path / "models" / "models--acme--tiny").is_dir()


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        (MODEL, "v9", "acme/tiny has no revision v9; check --revision"),
        (f"{MODEL}@v1", "v2", "the name has another revision than --revision v2; give one of them"),
        (MODEL, "../x", "--revision '../x' is no name of a branch, a tag or a commit"),
        (".", "main", "is empty"),
    ],
)
def test_a_wrong_revision(hub: FakeHub, tmp_path: Path, model: str, revision: str, message: str) -> None:
    settings = {"hf_endpoint": hub.url, "download_dir": str(tmp_path / "models"), "revision": revision}
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path if model == "." else model, plugins=PLUGINS.split(","), **settings)


# --- a server --------------------------------------------------------------------------------------------------


def get(url: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def processes(of: int) -> dict[int, str]:
    """The processes below one -> command line and environment."""
    found = {}
    for thread in Path(f"/proc/{of}/task").iterdir():
        for pid in map(int, (thread / "children").read_text().split()):
            about = Path(f"/proc/{pid}")
            found[pid] = (about / "cmdline").read_text() + (about / "environ").read_text()
            found |= processes(pid)
    return found


@dataclass
class Fetching:
    """A server that waits for the hub's weights until `released`. `admin`: the address of its admin listener."""

    process: subprocess.Popen[str]
    admin: str
    released: threading.Event

    def finish(self) -> list[str]:
        """Let the weights come. Returns what it said until it was ready, line by line."""
        self.released.set()
        assert self.process.stderr is not None
        said = []
        while said[-1:] == [] or not said[-1].startswith("serving at: "):
            said.append(self.process.stderr.readline())
            assert said[-1], said
        return [line.strip() for line in said]


@pytest.fixture
def fetching(hub: FakeHub, environment: dict[str, str]) -> Iterator[Fetching]:
    """A server that fetches its model."""
    asked, released = threading.Event(), threading.Event()

    def slow(handler: Handler) -> bool:
        if handler.command == "GET" and handler.path.endswith(WEIGHTS):
            asked.set()
            released.wait(60)
        return False

    hub.fault = slow
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        admin = probe.getsockname()[1]
    options = ("--port", "0", "--admin_port", str(admin), "--device", "cpu", "--max_total_token_num", "500")
    process = start(environment, "serve", MODEL, *options)
    try:
        assert asked.wait(60)
        yield Fetching(process, f"http://127.0.0.1:{admin}", released)
    finally:
        released.set()
        process.kill()
        process.communicate()


def test_a_server_by_name(fetching: Fetching) -> None:
    assert get(f"{fetching.admin}/live") == (200, {"status": "ok"})
    status, answer = get(f"{fetching.admin}/ready")
    assert (status, answer["reason"]) == (503, "the server is starting")
    below = processes(fetching.process.pid)
    assert sum("llmcore_hub.child" in text for text in below.values()) == 1
    said = fetching.finish()
    url = said[-1].removeprefix("serving at: ")
    assert f"revision: {MODEL}@{COMMIT}" in said and "download: 100 % of " in " ".join(said)
    _, models = get(f"{url}/v1/models")
    assert [model["id"] for model in models["data"]] == [MODEL]
    status, answer = get(f"{url}/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2, "ignore_eos": True})
    assert status == 200 and answer["usage"]["completion_tokens"] == 2
    below |= processes(fetching.process.pid)
    assert len(below) >= 4
    assert not [text for text in below.values() if TOKEN in text], "no process below the first one shows the token"
    assert TOKEN not in json.dumps(get(f"{fetching.admin}/server_info")[1])
    fetching.process.send_signal(signal.SIGTERM)
    assert fetching.process.wait(60) == 0


def test_a_server_that_is_stopped_while_it_fetches(fetching: Fetching, tmp_path: Path) -> None:
    below = processes(fetching.process.pid)
    assert list(tmp_path.rglob("*.incomplete"))
    fetching.process.send_signal(signal.SIGTERM)
    assert ended(fetching.process)[0] == 0
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
    assert not list(tmp_path.rglob("*.incomplete"))
