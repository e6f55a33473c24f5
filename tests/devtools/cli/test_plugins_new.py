"""`llmcore plugins new`: for every kind a package whose tests pass as they are written, and clear refusals."""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from llmcore import __version__
from llmcore.api.hookspecs import HOOKS
from llmcore.cli import root
from llmcore_devtools import registry_of
from llmcore_devtools.cli.new_plugin import KINDS, names_of, package, renamed, split

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def written(folder: Path, kind: str, name: str | None = None) -> Path:
    """A new package of one kind."""
    name = name or f"my-{kind}"
    result = CliRunner().invoke(root, ["plugins", "new", name, "--kind", kind, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    made = folder / name
    listed = [Path(line) for line in result.output.splitlines() if not line.startswith("next: ")]
    assert sorted(listed) == sorted(path for path in made.rglob("*") if path.is_file())
    return made


def installed(package: Path, site: Path) -> None:
    """What `pip install -e` leaves, without the seconds that pip takes: the metadata that its pyproject asks for."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    points = "".join(f"{name} = {module}\n" for name, module in project["entry-points"]["llmcore"].items())
    info.joinpath("entry_points.txt").write_text(f"[llmcore]\n{points}")


def test_the_tests_of_every_kind_pass_as_written(tmp_path: Path) -> None:
    site = tmp_path / "site"
    made = [written(tmp_path, kind) for kind in KINDS if kind != "family"]
    for folder in made:
        installed(folder, site)
    path = os.pathsep.join(map(str, [site, *made]))
    tests = [str(next(folder.glob("test_*.py"))) for folder in made]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *tests]
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(KINDS) - 1} passed" in done.stdout


def test_the_test_of_a_family_passes_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, as importing transformers takes a process of its own seconds."""
    folder, site = written(tmp_path, "family"), tmp_path / "site"
    installed(folder, site)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(site))
    runpy.run_path(str(folder / "test_my_family.py"))["test_what_it_brings_keeps_the_contracts"]()


def test_pip_installs_what_is_written(tmp_path: Path) -> None:
    site = tmp_path / "site"
    made = [written(tmp_path, "family", "plugin-fam"), written(tmp_path, "mode", "My_Mode")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, *made], check=True, timeout=120)
    environment = {**ENVIRONMENT, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "llmcore.cli", "plugins", "--json"]
    found = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    rows = {row["name"]: row for row in found}
    assert rows["fam"]["dist"] == "plugin-fam" and rows["fam"]["brings"] == {"model": ["fam"]}
    assert rows["my-mode"]["state"] == "active" and rows["my-mode"]["brings"] == {"mode": ["my-mode"]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_requires_what_it_imports_and_devtools_for_its_test(kind: str) -> None:
    files = dict(package(names_of("my-own"), kind))
    project = tomllib.loads(files["pyproject.toml"])["project"]
    major, minor = (int(part) for part in __version__.split(".")[:2])
    versions = f">={major}.{minor},<{major}.{minor + 1}"
    server = any("import llmcore_server" in text or "from llmcore_server" in text for text in files.values())
    assert server == (kind == "dialect")
    expected = ["llmcore-engine", *(["llmcore-server"] if server else [])]
    assert project["dependencies"] == [f"{dist}{versions}" for dist in expected]
    assert project["optional-dependencies"] == {"test": [f"llmcore-devtools{versions}"]}
    assert "pip install -e '.[test]'" in files["README.md"]


def test_every_hook_has_a_kind() -> None:
    assert sorted(KINDS.values()) == sorted(HOOKS)
    assert KINDS["family"] == "register_models" and KINDS["layer"] == "build_layer"


@pytest.mark.parametrize("kind", KINDS)
def test_two_plugins_of_one_kind_do_not_register_the_same_name(kind: str) -> None:
    one, other = (dict(package(names_of(name), kind)) for name in ("one-thing", "other-thing"))
    assert set(one) & set(other) == {"pyproject.toml", "README.md"}
    codes = ["".join(text for path, text in files.items() if path.startswith("llmcore_")) for files in (one, other)]
    if KINDS[kind].startswith("register_"):
        assert codes[0].replace("one-thing", "other-thing").replace("one_thing", "other_thing") == codes[1]
        assert codes[0] != codes[1], "nothing is named after the plugin"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("family", "option")])
def test_a_single_file_can_be_given_to_plugins(kind: str, tmp_path: Path) -> None:
    folder = written(tmp_path, kind, f"file-{kind}")
    (file,) = folder.glob("llmcore_*.py")
    assert file.stem in {info.name for info in registry_of(str(file)).implementers(KINDS[kind])}


def test_a_module_of_hooks_never_imports_torch() -> None:
    for kind in KINDS:
        files = dict(package(names_of("my-own"), kind))
        hooks = files.get("llmcore_my_own.py") or files["llmcore_my_own/__init__.py"]
        assert split(hooks) is None, f"{kind}: torch is imported with the hooks"
    assert "llmcore_my_own/code.py" in dict(package(names_of("my-own"), "family"))


def test_only_what_is_registered_is_renamed() -> None:
    code = 'S(name="mean", x=mean)\n"""`--estimator mean` is the mean"""\n# "mean"\nSpec(name="mean")\n'
    got = renamed(code, "register_length_estimators", names_of("my-own"))
    assert got == code.replace('"mean"', '"my-own"').replace("--estimator mean", "--estimator my-own")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = written(tmp_path, "mode")
    before = (folder / "README.md").read_text()
    result = CliRunner().invoke(root, ["plugins", "new", "my-mode", "--kind", "op", "--out", str(tmp_path)])
    assert "my-mode exists; nothing was written" in str(result.exception)
    assert (folder / "README.md").read_text() == before and len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("name", ["my plugin", "../mine", "-x", "x-", "7up", "näme", "a/b", ""])
def test_a_name_that_pip_would_not_take_is_refused(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(root, ["plugins", "new", "--kind", "op", "--out", str(tmp_path), "--", name])
    assert "is no name of a distribution" in str(result.exception), result.output
    assert not list(tmp_path.iterdir())


def test_the_name_of_an_installed_plugin_is_refused(tmp_path: Path) -> None:
    dist = importlib.metadata.distribution("plugin-llama").metadata["Name"]
    for name in ("llama", "plugin-llama", "radix"):
        result = CliRunner().invoke(root, ["plugins", "new", name, "--kind", "family", "--out", str(tmp_path)])
        assert "there is a plugin" in str(result.exception), result.output
    assert dist in str(CliRunner().invoke(root, ["plugins", "new", "llama", "--kind", "op"]).exception)


def test_options_of_the_listing_are_not_ignored(tmp_path: Path) -> None:
    result = CliRunner().invoke(root, ["plugins", "--json", "new", "x", "--kind", "op", "--out", str(tmp_path)])
    assert result.exit_code != 0 and "takes none of these options" in result.output


def test_a_kind_that_does_not_exist_lists_those_that_do() -> None:
    result = CliRunner().invoke(root, ["plugins", "new", "x", "--kind", "kernels"])
    assert result.exit_code == 2 and "'kernel'" in result.output and "'weight-loader'" in result.output


def test_the_requests_of_the_readmes_are_answered(tmp_path: Path, llmcore_server: Any) -> None:
    made = [written(tmp_path, kind) for kind in ("dialect", "logits-processor")]
    server = llmcore_server(plugins=tuple(str(next(folder.glob("llmcore_*.py"))) for folder in made))
    answers = []
    for folder in made:
        (request,) = [line for line in (folder / "README.md").read_text().splitlines() if line.startswith("curl ")]
        command = request.replace("curl ", "curl --fail -s ").replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stdout + done.stderr
        answers.append(json.loads(done.stdout))
    assert "text" in answers[0] and "text" in answers[1]["choices"][0]
