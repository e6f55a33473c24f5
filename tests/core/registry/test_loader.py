"""The loader: what is found, what is filtered before import, and what happens to a plugin that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from llmcore.api.errors import ConfigError, PluginError
from llmcore.api.specs import DeviceInfo, PluginInfo, SchedulerSpec
from llmcore.config import Config
from llmcore.registry import loader
from llmcore.registry.loader import build_registry, collect, configure, load, select
from llmcore.registry.registry import Failure, Registry
from sites import HEAD, SCHEDULER, Site, config, names


def the_failure(registry: Registry) -> Failure:
    (failure,) = registry.failures
    return failure


# --- discovery -------------------------------------------------------------------------------------------------


def test_plugins_are_listed_by_name_without_import(site: Site) -> None:
    site.install("zeta", "raise SystemError('imported')")
    module = site.install("alpha", "raise SystemError('imported')", version="2.1")
    assert select(None).plugins == (
        PluginInfo("alpha", "plugin-alpha", "2.1", module),
        PluginInfo("zeta", "plugin-zeta", "1.0", "dist_plugin_zeta"),
    )


def test_of_two_plugins_with_one_name_neither_takes_part_and_others_do(site: Site) -> None:
    site.install("same", SCHEDULER.format(name="one"), dist="plugin-one")
    site.install("same", SCHEDULER.format(name="two"), dist="plugin-two", version="3.0")
    site.install("good", SCHEDULER.format(name="good"))
    registry = build_registry(config())
    assert names(registry.plugins) == ["good"]
    one, two = map(str, registry.failures)
    assert one.startswith("plugin 'same' (plugin-one 1.0) failed in discovery: plugin-two 3.0 (dist_plugin_two) has")
    assert "--plugins plugin-one:same" in one and "--plugins=-plugin-one:same" in one
    assert "--plugins plugin-two:same" in two


@pytest.mark.parametrize("chosen", ["plugin-two:same", "-plugin-one:same", "Plugin_Two:same"])
def test_one_of_two_plugins_with_one_name_is_chosen_by_its_distribution(site: Site, chosen: str) -> None:
    site.install("same", SCHEDULER.format(name="one"), dist="plugin-one")
    site.install("same", SCHEDULER.format(name="two"), dist="plugin-two")
    registry = build_registry(config(chosen))
    assert [info.dist for info in registry.plugins] == ["plugin-two"] and registry.failures == []
    assert registry.find(SchedulerSpec, "two")


def test_a_name_that_two_plugins_have_ends_a_start_that_asks_for_it(site: Site) -> None:
    site.install("same", "", dist="plugin-one")
    site.install("same", "", dist="plugin-two")
    with pytest.raises(PluginError, match="--plugins plugin-one:same"):
        build_registry(config("same"))
    with pytest.raises(ConfigError, match=r"no plugin 'plugin-oen:same'; .* Did you mean plugin-one:same"):
        select(["plugin-oen:same"])
    with pytest.raises(ConfigError, match=r"two plugins that are called 'same'.*give one of them"):
        select(["plugin-one:same", "plugin-two:same"])
    files = [site.file("x.py", ""), str(site.path / "other" / "x.py")]
    (site.path / "other").mkdir()
    (site.path / "other" / "x.py").touch()
    with pytest.raises(ConfigError, match=r"two plugins that are called 'x'"):
        select(files)


BAD_METADATA = {
    "no value": ("[llmcore]\nbad\n", "Metadata-Version: 2.1\nName: bad\nVersion: 1\n"),
    "no metadata": ("[llmcore]\nbad = dist_bad\n", None),
    "no name": ("[llmcore]\nbad = dist_bad\n", "Version: 1\n"),
    "empty": ("", ""),
    "not a module": ("[llmcore]\nbad = !!\n", "Name: bad\nVersion: 1\n"),
    "an attribute": ("[llmcore]\nbad = json:loads\n", "Name: bad\nVersion: 1\n"),
    "bytes": (b"[llmcore]\nb\xff = x\n", "Name: bad\nVersion: 1\n"),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_metadata_that_cannot_be_read_harms_no_other_plugin(site: Site, case: str) -> None:
    points, metadata = BAD_METADATA[case]
    site.install("good", SCHEDULER.format(name="good"))
    info = site.path / "bad-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(points if isinstance(points, bytes) else points.encode())
    if metadata is not None:
        (info / "METADATA").write_text(metadata)
    assert names(build_registry(config()).plugins) == ["good"]


def test_naming_plugins_keeps_the_others_from_being_imported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("a", SCHEDULER.format(name="a"))
    site.install("b", "raise SystemError('imported')")
    site.file("dist_inside.py", SCHEDULER.format(name="inside"))
    monkeypatch.setattr(loader, "BUILTINS", {"inside": "dist_inside"})
    registry = build_registry(config("a"))
    assert names(registry.plugins) == ["a", "inside"]
    assert "dist_plugin_b" not in sys.modules


def test_a_minus_leaves_out_one_and_built_ins_have_no_privilege(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BUILTINS", {"inside": "dist_inside"})
    site.install("a", "")
    site.install("b", "")
    assert names(select(["-inside"]).plugins) == ["a", "b"]
    assert names(select(["a", "-inside"]).plugins) == ["a"]
    assert names(select(["-a"]).plugins) == ["b", "inside"]


def test_a_built_in_is_replaced_by_the_distribution_that_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BUILTINS", {"fcfs": "dist_inside"})
    site.file("dist_inside.py", SCHEDULER.format(name="inside"))
    site.install("fcfs", SCHEDULER.format(name="better"), dist="better-fcfs")
    registry = build_registry(config())
    assert [info.dist for info in registry.plugins] == ["llmcore-engine"]
    assert "to replace it, give --plugins better-fcfs:fcfs" in str(the_failure(registry))
    for chosen in ("better-fcfs:fcfs", "-llmcore-engine:fcfs"):
        registry = build_registry(config(chosen))
        assert [info.dist for info in registry.plugins] == ["better-fcfs"] and registry.failures == []
    assert select(["-fcfs"]).plugins == ()


METADATA = """Metadata-Version: 2.1
Name: llmcore-engine
Version: 0.2.0
Requires-Dist: plugin-never>=1
Requires-Dist: Plugin_Http<0.3,>=0.2; extra == "server"
Requires-Dist: plugin-talk (>=0.2); (python_version >= "3.11") and extra == 'server'
Requires-Dist: plugin-tools>=0.2; extra == "devtools"
Requires-Dist: plugin-lint; extra == "lint"
"""


@pytest.fixture
def served(site: Site) -> Iterator[Site]:
    """A site whose llmcore-engine has extras; all that they require is installed, and more."""
    info = site.path / "llmcore_engine-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    for name in ("http", "talk", "tools", "lint", "never", "qwen", "other"):
        site.install(name, SCHEDULER.format(name=name))
    loader.extras.cache_clear()
    yield site
    loader.extras.cache_clear()


@pytest.mark.parametrize(
    ("named", "taking_part"),
    [
        (["qwen"], ["http", "qwen", "talk", "tools"]),
        (["qwen", "-talk"], ["http", "qwen", "tools"]),
        (["-talk", "qwen"], ["http", "qwen", "tools"]),
        (["qwen", "-plugin-talk:talk", "-tools"], ["http", "qwen"]),
        (["-talk"], ["http", "lint", "never", "other", "qwen", "tools"]),
        (["http"], ["http", "talk", "tools"]),
        (None, ["http", "lint", "never", "other", "qwen", "talk", "tools"]),
    ],
)
def test_what_an_extra_requires_stays_selected(served: Site, named: list[str] | None, taking_part: list[str]) -> None:
    selection = select(named)
    assert names(selection.plugins) == taking_part and selection.clashes == ()


def test_extras_are_read_from_the_metadata(served: Site) -> None:
    assert loader.extras() == {"plugin-http": "server", "plugin-talk": "server", "plugin-tools": "devtools"}


def test_without_metadata_no_plugin_of_another_distribution_stays(
    served: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "CORE_DIST", "a-distribution-that-nobody-installed")
    assert loader.extras() == {}
    assert names(select(["qwen"]).plugins) == ["qwen"]


def test_a_plugin_of_an_extra_is_replaced_by_the_distribution_that_is_named(served: Site) -> None:
    served.install("talk", SCHEDULER.format(name="mine"), dist="my-talk")
    selection = select(["qwen"])
    assert [info.dist for info in selection.plugins] == ["plugin-http", "plugin-qwen", "plugin-talk", "plugin-tools"]
    (clash,) = selection.clashes
    assert clash.plugin.dist == "my-talk" and "--plugins my-talk:talk" in clash.fix and not clash.fatal
    selection = select(["qwen", "my-talk:talk"])
    assert [info.dist for info in selection.plugins] == ["plugin-http", "plugin-qwen", "my-talk", "plugin-tools"]
    assert selection.clashes == ()


OPTIONS = (
    HEAD
    + """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Http:
    \"\"\"Where it listens.\"\"\"

    port: int = option(8000, "Port.", low=0)

    def check(self, config, origins):
        if self.port == config.memory.running_max_req_size:
            raise ConfigError(origins["port"] + " clashes")

@hookimpl
def register_options():
    return options_of(Http, serving=True)
"""
)


def test_configure_knows_the_settings_of_every_plugin_that_takes_part(site: Site) -> None:
    site.install("http", OPTIONS)
    site.install("other", SCHEDULER.format(name="other"))
    made, registry = configure(port="9", mem_fraction=0.5)
    assert made.plugin_options == {"port": 9} and made.memory.mem_fraction == 0.5
    assert names(made.discovered) == names(registry.plugins) == ["http", "other"]
    with pytest.raises(ConfigError, match="no setting 'prot'"):
        configure(prot=1)
    with pytest.raises(ConfigError, match="--port clashes"):
        configure(port=7, running_max_req_size=7)


def test_configure_takes_the_plugins_that_are_named(site: Site) -> None:
    site.install("http", OPTIONS)
    site.install("other", SCHEDULER.format(name="other"))
    made, registry = configure(["other"])
    assert names(made.discovered) == names(registry.plugins) == ["other"] and made.plugins.plugins == ("other",)
    with pytest.raises(ConfigError, match="no setting 'port'"):
        configure(["other"], port=1)
    site.install("broken", "import module_that_is_absent")
    assert names(configure()[1].plugins) == ["http", "other"]
    with pytest.raises(PluginError, match="module_that_is_absent"):
        configure(["broken"])


def test_settings_of_a_server_have_no_effect_on_llm(site: Site) -> None:
    from llmcore import LLM

    site.install("http", OPTIONS)
    with pytest.raises(ConfigError, match="port is a setting of the server and has no effect on LLM; leave it out"):
        LLM("m", port=1)


def test_an_unknown_name_lists_what_exists(site: Site) -> None:
    site.install("llama", "")
    with pytest.raises(ConfigError, match=r"no plugin 'lama'; installed: llama. Did you mean llama\?"):
        select(["lama"])
    with pytest.raises(ConfigError, match="no plugin 'radix'"):
        select(["-radix"])


def test_a_file_is_a_plugin_whose_import_strings_work(site: Site) -> None:
    path = site.file(
        "mine.py",
        HEAD + "def make(limits):\n    return 'made'\n"
        "@hookimpl\ndef register_schedulers():\n    yield SchedulerSpec(name='mine', make=f'{__name__}:make')\n",
    )
    registry = build_registry(config(path))
    assert names(registry.plugins) == ["mine"]
    assert load(registry.find(SchedulerSpec, "mine").make)(None) == "made"
    with pytest.raises(ConfigError, match="no plugin file"):
        select([str(site.path / "absent.py")])


def test_a_process_takes_the_list_it_was_handed(site: Site) -> None:
    site.install("a", SCHEDULER.format(name="a"))
    handed = select(None).plugins
    site.install("late", SCHEDULER.format(name="late"))
    registry = build_registry(Config(discovered=handed))
    assert names(registry.plugins) == ["a"]


# --- failures --------------------------------------------------------------------------------------------------

BROKEN = {
    "import": ("import module_that_is_absent", "ModuleNotFoundError", "install 'module_that_is_absent'"),
    "raise": ("raise ValueError('boom')", "ValueError: boom", "--plugins=-bad"),
    "exit": ("import sys; sys.exit(3)", "SystemExit: 3", "--plugins=-bad"),
    "hook": (HEAD + "@hookimpl\ndef register_ops():\n    yield 1 / 0", "ZeroDivisionError", "--plugins=-bad"),
    "type": (
        HEAD + "@hookimpl\ndef register_ops():\n    yield ModeSpec(name='m')",
        "returned a ModeSpec, needs OpSpec",
        "--plugins=-bad",
    ),
    "none": (HEAD + "@hookimpl\ndef register_ops():\n    yield None", "returned a NoneType", "--plugins=-bad"),
    "name": (HEAD + "@hookimpl\ndef register_modes():\n    yield ModeSpec(name='a b=c')", "'a b=c' is no name", ""),
    "typo": (
        HEAD + "@hookimpl\ndef register_kernel():\n    return []",
        "no hook 'register_kernel'. Did you mean register_kernels",
        "--plugins=-bad",
    ),
    "base": ("class Odd(BaseException):\n    def __str__(self): raise OSError\nraise Odd", "Odd", "--plugins=-bad"),
    "generator": ("raise GeneratorExit", "GeneratorExit", "--plugins=-bad"),
    "long": ("raise ValueError('x\\n' * 10**6)", "ValueError: x x", "--plugins=-bad"),
    "exit in a hook": (
        HEAD + "@hookimpl\ndef register_ops():\n    raise SystemExit('bye')\n    yield",
        "SystemExit: bye",
        "--plugins=-bad",
    ),
    "field": (
        HEAD + "@hookimpl\ndef register_commands():\n    yield CommandSpec(name='c', command='m:c', summary=None)",
        "CommandSpec.summary is a NoneType, needs str",
        "--plugins=-bad",
    ),
    "mapping": (
        HEAD + "@hookimpl\ndef register_modes():\n    yield ModeSpec(name='c', kernels=None)",
        "ModeSpec.kernels is a NoneType, needs collections.abc.Mapping[str, str]",
        "--plugins=-bad",
    ),
    "argument": (HEAD + "@hookimpl\ndef on_startup(settings): ...", "settings", "--plugins=-bad"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_plugin_that_fails_is_reported_and_the_others_work(site: Site, case: str) -> None:
    code, error, fix = BROKEN[case]
    site.install("bad", code, version="0.3")
    site.install("good", SCHEDULER.format(name="good"))
    registry = build_registry(config())
    assert names(registry.plugins) == ["good"]
    assert registry.find(SchedulerSpec, "good")
    failure = the_failure(registry)
    assert failure.plugin == PluginInfo("bad", "plugin-bad", "0.3", "dist_plugin_bad")
    assert error in failure.error and fix in failure.fix
    assert len(str(failure)) < 1500 and "\n" not in str(failure)


@pytest.mark.parametrize("case", BROKEN)
def test_a_plugin_that_was_named_and_fails_ends_the_start(site: Site, case: str) -> None:
    site.install("bad", BROKEN[case][0])
    with pytest.raises(PluginError, match=r"plugin 'bad' \(plugin-bad 1.0\) failed in"):
        build_registry(config("bad"))
    assert the_failure(collect(config("bad"))).fatal


def test_a_plugin_takes_part_whole_or_not_at_all(site: Site) -> None:
    code = SCHEDULER.format(name="half") + "@hookimpl\ndef register_weight_loaders():\n    yield 1 / 0\n"
    site.install("bad", code + "@hookimpl\ndef on_shutdown():\n    raise AssertionError('called')\n")
    registry = build_registry(config())
    assert registry.specs(SchedulerSpec) == []
    registry.call("on_shutdown")


def test_import_strings_say_what_is_missing() -> None:
    assert load("llmcore.api.specs:DeviceInfo") is DeviceInfo
    for target, message in (
        ("llmcore.api.specs", "no import string"),
        ("llmcore.absent:x", "cannot import 'llmcore.absent:x'"),
        ("llmcore.api.specs:Absent", "has no attribute 'Absent'"),
    ):
        with pytest.raises(PluginError, match=message):
            load(target)
