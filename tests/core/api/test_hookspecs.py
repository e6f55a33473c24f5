"""Every hook has its contract, its page, its example, its test and its conformance check; and the examples work."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import sys
from pathlib import Path
from random import Random
from types import ModuleType

import llmcore_devtools
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from llmcore.api import ConfigError, KVGroupSpec, RequestError, specs
from llmcore.api.balancing import Arrival, Candidate
from llmcore.api.hookspecs import HOOKS
from llmcore.api.models import LayerInfo
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.api.text import ParserContext, TextDelta, ToolCallBegun, ToolCallDelta, ToolCallEnded
from llmcore.cli.hooks import contract
from llmcore.config import make_config
from llmcore.ops import made
from llmcore.registry.loader import load
from llmcore.registry.model_sources import with_model_resolved
from llmcore.registry.registry import CONTRIBUTIONS, Registry
from llmcore.registry.resolve import candidates_for, resolve
from llmcore.text.tokenizer import load_tokenizer
from llmcore.weights.source import open_checkpoint
from llmcore_devtools import check_plugin, registry_of
from llmcore_devtools.conformance_observing import CONFIG, RECORD
from llmcore_devtools.dialect import FakeBridge, dialect_client, fake_front
from llmcore_devtools.tokenizer import write_tokenizer
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "hooks.md").read_text()
CPU = DeviceInfo("cpu")


def example(hook: str) -> tuple[Registry, ModuleType]:
    """The example of a hook as a loaded plugin, after it has passed its conformance checks."""
    registry = registry_of(str(EXAMPLES / f"{hook}.py"))
    assert hook in check_plugin(registry, hook)
    return registry, sys.modules[f"llmcore_file_{hook}"]


# --- every hook has everything ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_its_five_parts(hook: str) -> None:
    row = contract(hook)
    assert all(row.values()), "its contract"
    assert f"\n## {hook}\n" in PAGE and row["signature"] in PAGE, "its page"
    assert (EXAMPLES / f"{hook}.py").is_file(), "its example"
    tests = [node.name for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert f"test_hook_{hook}" in tests, "its test"
    assert list(inspect.signature(getattr(llmcore_devtools, f"check_{hook}")).parameters) == [
        "registry",
        "plugin",
        "samples",
    ], "its conformance check"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_argument_and_result_is_typed(hook: str) -> None:
    signature = inspect.signature(HOOKS[hook])
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())
    if hook.startswith("register_"):
        assert signature.return_annotation == f"Iterable[{CONTRIBUTIONS[hook].__name__}]"


def test_there_is_no_example_without_a_hook() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(HOOKS)


# --- the examples do what they say -----------------------------------------------------------------------------


def test_hook_register_models() -> None:
    registry, _ = example("register_models")
    assert registry.model_for(["ArceeForCausalLM"]).name == "arcee"


def test_hook_register_ops() -> None:
    registry, module = example("register_ops")
    context = OpContext(op="add_one", device=CPU, dtype="f32", shape={"size": 8})
    found = resolve(candidates_for(registry, "add_one"), context, {})
    assert made(found.chosen, context) is module.reference


def test_hook_register_kernels() -> None:
    registry, _ = example("register_kernels")
    candidates = candidates_for(registry, "rms_norm")
    even = OpContext(op="rms_norm", device=CPU, dtype="f32", shape={"size": 64})
    odd = OpContext(op="rms_norm", device=CPU, dtype="f32", shape={"size": 63})
    assert resolve(candidates, even, {}).chosen.name == "written-out"
    assert resolve(candidates, odd, {}).reasons["written-out"] == "needs an even size, has 63"


def test_hook_register_modes() -> None:
    from llmcore.registry.modes import apply_modes

    registry, _ = example("register_modes")
    pins = apply_modes(["reference"], registry, CPU)
    assert pins.kernels == {"rms_norm": "torch", "add_rms_norm": "torch"}


def test_hook_register_devices() -> None:
    from llmcore.registry.devices import find_device

    registry, module = example("register_devices")
    assert find_device(registry, "counting-cpu") == DeviceInfo("cpu", name="counting-cpu")
    device = module.CountingCPU(0)
    device.synchronize()
    assert device.waits == 1


def test_hook_register_schedulers() -> None:
    registry, module = example("register_schedulers")
    assert load(registry.find(specs.SchedulerSpec, "one-prompt").make) is module.OnePrompt


def test_hook_register_length_estimators() -> None:
    _, module = example("register_length_estimators")
    estimator = module.Mean(None)
    columns = np.asarray([0, 0, 50], np.int32), np.asarray([100, 5, 100], np.int32), np.zeros(3, np.bool_)
    assert estimator.totals(*columns, 0.5).tolist() == [100, 5, 100]
    estimator.observe(10)
    assert estimator.totals(*columns, 0.5).tolist() == [10, 5, 51]


def test_hook_register_balancers() -> None:
    _, module = example("register_balancers")
    balancer, places = module.Sticky(Random(0)), [Candidate(f"server-{index}") for index in range(5)]
    chosen = [places[balancer.choose(Arrival(100, key), places)].name for key in range(100)]
    assert set(chosen) == {place.name for place in places}
    without = [place for place in places if place.name != chosen[0]]
    again = [without[balancer.choose(Arrival(100, key), without)].name for key in range(100)]
    moved = {was for was, now in zip(chosen, again, strict=True) if was != now}
    assert moved == {chosen[0]}, "only what was on the place that is gone moves"


def test_hook_register_kv_layouts() -> None:
    registry, module = example("register_kv_layouts")
    group = KVGroupSpec(name="kv", layers=(0, 1), kv_heads=3, key_size=8, value_size=8)
    token = load(registry.find(specs.KVLayoutSpec, "token").make)(group, 1, "f32")
    assert module.make(group, 1, "f32").bytes * 2 == token.bytes


def test_hook_register_kv_managers() -> None:
    _, module = example("register_kv_managers")
    cache = module.LastPrompts(granule=2)
    content = np.arange(5, dtype=np.int64)
    assert cache.insert(b"", content, np.asarray([7, 9], np.int32)).tolist() == [7, 9]
    assert cache.match(b"", content[:4]).tolist() == [7, 9]
    assert cache.match(b"other", content).tolist() == []
    assert cache.evict(1, lambda granules: np.zeros(len(granules), np.bool_)).tolist() == [9]


def test_hook_register_model_sources(tmp_path: Path) -> None:
    registry, _ = example("register_model_sources")
    (tmp_path / "shelf" / "tiny").mkdir(parents=True)
    (tmp_path / "shelf" / "tiny" / "config.json").write_text("{}")
    options = {"shelf_folder": str(tmp_path / "shelf"), "shelf_copies": str(tmp_path / "copies")}
    config = make_config([spec for spec, _ in registry.specs(specs.OptionSpec)], model_dir="shelf:tiny", **options)
    told: list[tuple[str, int, int]] = []
    found = with_model_resolved(config, registry, lambda *progress: told.append(progress))
    assert (found.model.path / "config.json").read_text() == "{}"
    assert found.model.path == tmp_path / "copies" / "tiny"
    assert (found.model.model_name, found.revision[:5], told) == (("tiny",), "tiny@", [("copy", 0, 2)])


def test_hook_register_weight_loaders(tmp_path: Path) -> None:
    registry, _ = example("register_weight_loaders")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    np.save(tmp_path / "lm_head.weight.npy", np.ones((3, 2), np.float32))
    assert check_plugin(registry, "register_weight_loaders", [tmp_path])
    sizes = load(registry.find(specs.WeightLoaderSpec, "npy").open)(tmp_path).sizes()
    assert sizes == {"lm_head.weight": ((3, 2), "F32")}


def test_hook_register_quant_methods(tmp_path: Path) -> None:
    registry, _ = example("register_quant_methods")
    config = {"quantization_config": {"quant_method": "int8_rows"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight = np.asarray([[1, -2], [3, 4]], np.int8)
    save_file({"x.weight_scale": np.asarray([2, 0.5], np.float32), "x.weight": weight}, tmp_path / "m.safetensors")
    assert check_plugin(registry, "register_quant_methods", [tmp_path])
    method = load(registry.find(specs.QuantMethodSpec, "int8-rows").make)({}, CONFIG)
    plain = method.checkpoint(open_checkpoint(registry, tmp_path), torch.device("cpu"))
    assert {name: read().tolist() for name, read in plain.tensors()} == {"x.weight": [[2, -4], [1.5, 2]]}


def test_hook_register_tokenizers(tmp_path: Path) -> None:
    registry, module = example("register_tokenizers")
    (tmp_path / "bytes.tokenizer").touch()
    assert check_plugin(registry, "register_tokenizers", [tmp_path])
    with pytest.raises(RequestError, match="is no token id"):
        module.ByteTokenizer(tmp_path).token_bytes(300)


def test_hook_register_output_parsers() -> None:
    registry, module = example("register_output_parsers")
    assert registry.find(specs.OutputParserSpec, "call-lines").kind == "tool"
    parser = module.CallLines(ParserContext(tools={"add": {}}))
    assert list(parser.feed('CALL add {"a"')) == []
    assert list(parser.feed(": 1}\nso")) == [
        ToolCallBegun(0, "add"),
        ToolCallDelta(0, '{"a": 1}'),
        ToolCallEnded(0),
    ]
    assert list(parser.finish()) == [TextDelta("so")]


def test_hook_register_dialects(tmp_path: Path) -> None:
    _, module = example("register_dialects")
    bridge = FakeBridge()
    client = dialect_client(module.routes, fake_front(bridge, load_tokenizer(write_tokenizer(tmp_path))))
    assert client.simulate_post("/complete", json={"text": "ab", "tokens": 5}).json == {"text": "ababa"}
    assert client.simulate_post("/complete", json={"text": 3}).json["error"]["param"] == "text"
    assert len(bridge.submitted) == 1


def test_hook_register_logits_processors(tmp_path: Path) -> None:
    from llmcore.api import ProcessorContext

    _, module = example("register_logits_processors")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    start = module.make({"texts": ["ab", "b"]}, ProcessorContext(300, (), lambda: tokenizer))
    a, b = (tokenizer.encode(text)[0] for text in "ab")
    choice = start(np.empty(0, np.int32))
    words = choice.mask()
    assert [t for t in range(300) if words[t // 32] >> t % 32 & 1] == sorted([a, b])
    choice.accept(a)
    assert not choice.finished()
    choice.accept(b)
    assert choice.finished()
    with pytest.raises(ValueError, match="texts must be a list"):
        module.make({"texts": "yes"}, None)


def test_hook_register_commands() -> None:
    registry, _ = example("register_commands")
    command = load(registry.find(specs.CommandSpec, "hello").command)
    assert CliRunner().invoke(command, ["you"]).output == "Hello you!\n"


def test_hook_register_options(caplog: pytest.LogCaptureFixture) -> None:
    registry, module = example("register_options")
    brought = [spec for spec, _ in registry.specs(specs.OptionSpec) if spec.section is module.Probe]
    assert registry.find(specs.OptionSpec, "probe_format").choices == ("csv", "json")
    with pytest.raises(ConfigError, match="--probe_layers: -1 is out of range"):
        make_config(brought, probe_layers=-1)
    make_config(brought, probe_format="json")
    assert "--probe_format has no effect: probe_layers is 0" in caplog.text
    registry.call("on_startup", config=make_config(brought, probe_layers=2))
    assert module.KEPT["probe"] == module.Probe(probe_layers=2)


def test_hook_register_metric_sinks() -> None:
    _, module = example("register_metric_sinks")
    tally = module.Tally()
    tally.request_finished(RECORD)
    assert tally.ends == {"stop": 1}


def test_hook_build_layer() -> None:
    import torch
    from llmcore.layers import Rows

    registry, _ = example("build_layer")

    class Double(torch.nn.Module):
        def forward(self, x, step):
            return x[0] * 2, x[1]

    x = torch.ones(2, 8)
    probe = registry.wrap_layer(Double(), LayerInfo("layers.0", 0, CONFIG))
    probe((x, x), Rows(0))
    assert float(probe.norm) == pytest.approx(8.0)
    assert isinstance(registry.wrap_layer(Double(), LayerInfo("layers.1", 1, CONFIG)), Double)


def test_hook_on_startup() -> None:
    registry, _ = example("on_startup")
    with pytest.raises(ConfigError, match="no code that comes with a model"):
        registry.call("on_startup", config=make_config(trust_remote_code=True))


def test_hook_on_model_built(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "my_plugin"):
        example("on_model_built")
    assert "linear: torch" in caplog.text


def test_hook_on_request_finished(caplog: pytest.LogCaptureFixture) -> None:
    import dataclasses

    registry, _ = example("on_request_finished")
    registry.call("on_request_finished", record=dataclasses.replace(RECORD, first_token=2.5))
    assert "waited 2.5 s" in caplog.text


def test_hook_on_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    registry, _ = example("on_shutdown")
    caplog.clear()
    with caplog.at_level(logging.INFO, "my_plugin"):
        registry.call("on_shutdown")
    assert "bye" in caplog.text


# --- the checks can fail ---------------------------------------------------------------------------------------

WRONG = {
    "register_kernels": ("+ eps", "+ 2 * eps + 0.1", "off by"),
    "register_ops": (
        "def samples(",
        "def make(context):\n    return lambda x: x + 2\n\n\ndef samples(",
        "add_one on cpu, f32, 1 tokens: add_one, sample 1, output 0: off by",
    ),
    "register_modes": ('"rms_norm": "torch"', '"rms_norm": "fast"', "rms_norm has no kernel fast"),
    "register_length_estimators": ("produced + 1", "produced", "less than one more token"),
    "register_balancers": ("self.random.randrange(len(candidates))", "len(candidates)", "it chooses place"),
    "register_kv_managers": ("if not in_use", "if True or in_use", "in use"),
    "register_kv_layouts": ("new.half()", "new.half() * 2", "gather: off by"),
    "register_logits_processors": ("words_of(self.vocab_size)", "words_of(self.vocab_size + 64)", "its mask is int32"),
    "register_tokenizers": ('"bytes.tokenizer").is_file()', '"x").parent.is_dir()', "recognises an empty folder"),
    "register_model_sources": ('"/" not in text', "True or text", "takes"),
    "register_commands": ("@click.command()", "@(lambda f: f)", "is a function"),
    "register_options": ('option("csv"', 'option("xml"', "is not a choice"),
    "register_quant_methods": ('== "int8_rows"', "is not None", "which is another method's config"),
    "register_models": (".square()", ".abs()", "logits of token 0 are off"),
    "build_layer": ("return out", "return out[0]", "unpack"),
    "register_output_parsers": ("(self.line + text).split", "text.split", "cut"),
    "register_dialects": ('"/complete"', '"complete"', "does not start with /"),
    "register_devices": ('info = DeviceInfo("cpu"', 'info = DeviceInfo("x"', "info.type"),
}


@pytest.mark.parametrize("hook", WRONG)
def test_the_check_of_a_hook_fails_where_the_contract_is_broken(hook: str, tmp_path: Path) -> None:
    right, wrong, message = WRONG[hook]
    code = (EXAMPLES / f"{hook}.py").read_text()
    assert right in code
    path = tmp_path / f"broken_{hook}.py"
    path.write_text(code.replace(right, wrong))
    with pytest.raises((AssertionError, AttributeError, ValueError), match=message):
        check_plugin(registry_of(str(path)), path.stem)


def test_a_plugin_that_takes_no_part_is_not_checked() -> None:
    with pytest.raises(AssertionError, match="plugin 'nobody' takes no part"):
        check_plugin(registry_of(), "nobody")
