"""Which quantization method reads a checkpoint, and a method that holds the weights of linears itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api import ConfigError, ModeSpec, Placement, PluginError, PluginInfo, QuantMethodSpec
from llmcore.cli.plan import make_plan
from llmcore.config import make_config
from llmcore.engine.model import load_model, pick_device
from llmcore.layers import Build, LinearShape
from llmcore.registry.registry import Registry
from llmcore.weights.quant import describe, find_quantization
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.family import oracle, small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from safetensors.torch import load_file, save_file

OWNER = PluginInfo("mine", "mine", "1", "mine")


def registry(*specs: QuantMethodSpec | ModeSpec) -> Registry:
    found = Registry(())
    for spec in specs:
        found.take(spec, OWNER)
    return found


# --- which one -------------------------------------------------------------------------------------------------


class Nothing:
    def __init__(self, quantization: Mapping[str, Any], config: object) -> None:
        self.quantization = {"bits": 4, **quantization}
        assert len(self.quantization) / (self.quantization["bits"]) > 0

    def checkpoint(self, checkpoint: Any, device: torch.device) -> Any:
        return checkpoint

    def method_for(self, modules: Sequence[str]) -> None:
        return None

    def expert_method(self, modules: Sequence[str]) -> None:
        return None


def is_w4(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == "w4"


W4 = QuantMethodSpec(name="w4", make=f"{__name__}:Nothing", reads=f"{__name__}:is_w4", summary="four bits")
OTHER = replace(W4, name="other")
AT_LOAD = QuantMethodSpec(name="at-load", make=f"{__name__}:Nothing", plain=True, options=frozenset({"group"}))
READ = {"quantization_config": {"quant_method": "w4"}}


def test_the_method_that_reads_the_config_is_taken() -> None:
    found = find_quantization(registry(W4, AT_LOAD), READ, CONFIG)
    assert found is not None and found.name == "w4"
    for plain in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        assert find_quantization(registry(W4, AT_LOAD), plain, CONFIG) is None


def test_a_pin_decides() -> None:
    for hf, pin in ((READ, "w4"), (READ, "other"), ({}, "at-load")):
        found = find_quantization(registry(W4, OTHER, AT_LOAD), hf, CONFIG, pin)
        assert found is not None and found.name == pin


def test_what_modes_choose_is_for_plain_checkpoints() -> None:
    found = find_quantization(registry(W4, AT_LOAD), {}, CONFIG, "at-load", {"group": 64})
    assert found is not None and isinstance(found.method, Nothing)
    assert found.method.quantization == {"bits": 4, "group": 64}
    with pytest.raises(ConfigError, match="chooses the group of w4, but the weights are quantized; leave it out"):
        find_quantization(registry(W4), READ, CONFIG, "w4", {"group": 64})
    with pytest.raises(ConfigError, match="quantization method at-load has no bits to choose"):
        find_quantization(registry(AT_LOAD), {}, CONFIG, "at-load", {"group": 64, "bits": 3})


@pytest.mark.parametrize(
    ("specs", "quantization", "pin", "message"),
    [
        (
            [W4, AT_LOAD],
            {"quant_method": "w3", "bits": 4},
            None,
            r"'w3' \(bits 4\), .*no plugin.*\(methods: w4: four",
        ),
        (
            [],
            {"quant_method": "awq"},
            None,
            r"'awq', which plugin-quantization reads, .* not active: pip install",
        ),
        ([], {"quant_method": "w3"}, None, r"\(methods: none\); install one that does, or use .*unquantized"),
        ([W4], {"bits": 4}, None, "a quantization_config without quant_method"),
        ([W4], "w4", None, "quantization_config in the model's config.json is 'w4' and has to be an object"),
        ([W4, OTHER], {"quant_method": "w4"}, None, "read by w4 of plugin 'mine', other of plugin 'mine'; leave one"),
        ([W4], {}, "w4", "method w4 needs a checkpoint that is quantized for it"),
        ([W4, AT_LOAD], {"quant_method": "w4"}, "at-load", "method at-load does not read that, w4 does: leave out"),
        ([W4], {"quant_method": "awq"}, "w4", "method w4 does not read that, nothing installed does"),
        ([W4], {"quant_method": "w4"}, "w5", "no quant method 'w5'; known: w4"),
    ],
)
def test_what_cannot_be_read_says_what_would(
    specs: Sequence[QuantMethodSpec], quantization: object, pin: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_quantization(registry(*specs), {"quantization_config": quantization}, CONFIG, pin)


def test_a_method_that_fails_is_named() -> None:
    with pytest.raises(PluginError, match=r"method w4 of plugin 'mine' failed on 'w4' .*bits 0.*ZeroDivisionError"):
        find_quantization(registry(W4), {"quantization_config": {"quant_method": "w4", "bits": 0}}, CONFIG)


def test_long_values_stay_out_of_errors() -> None:
    assert describe({"quant_method": "x", "modules": ["a" * 30], "group": 128}) == "'x' (group 128)"


# --- a method with linears of its own --------------------------------------------------------------------------


class Int8Linears:
    """Weights as int8 with a scale per row, in a file or quantized while a plain one is read."""

    activations: frozenset[str] = frozenset()
    multiples = (1, 1)

    def create(self, shape: LinearShape, build: Build) -> Any:
        return Int8Linear(shape, build)


@dataclass
class Int8Linear:
    shape: LinearShape
    build: Build

    def __post_init__(self) -> None:
        where = self.build.torch_device
        size = (self.shape.outputs, self.shape.inputs)
        self.qweight = torch.nn.Parameter(torch.zeros(size, dtype=torch.int8, device=where), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(size[0], device=where), requires_grad=False)

    def tensors(self) -> Mapping[str, tuple[torch.nn.Parameter, Placement]]:
        rows = self.shape.placement(columns=False)
        return {"qweight": (self.qweight, self.shape.placement()), "scale": (self.scale, rows)}

    def bind(self) -> tuple[tuple[Any, ...], frozenset[str]]:
        def call(x: torch.Tensor) -> torch.Tensor:
            return (x @ self.qweight.to(x.dtype).T) * self.scale.to(x.dtype)

        return (call,) * 5, frozenset()

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if name == "qweight":
            tensor.random_(-127, 128, generator=generator)
        else:
            tensor.fill_(0.02 / 73.3)


class Int8:
    def __init__(self, quantization: Mapping[str, Any], config: object) -> None:
        self.stored = bool(quantization)

    def checkpoint(self, checkpoint: Any, device: torch.device) -> Any:
        return checkpoint if self.stored else Int8Checkpoint(checkpoint)

    def method_for(self, modules: Sequence[str]) -> Int8Linears:
        return Int8Linears()

    def expert_method(self, modules: Sequence[str]) -> None:
        return None


def is_int8(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == "int8"


def of_a_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", "lm_head.weight"))


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.float().abs().amax(1) / 127
    return (weight.float() / scale.unsqueeze(1)).round().to(torch.int8), scale


class Int8Checkpoint:
    def __init__(self, inner: Any) -> None:
        self.inner, self.config, self.generation_config = inner, inner.config, inner.generation_config

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        found = {}
        for name, (shape, dtype) in self.inner.sizes().items():
            stem = name.removesuffix("weight")
            both = {f"{stem}qweight": (shape, "I8"), f"{stem}scale": (shape[:1], "F32")}
            found |= both if of_a_linear(name) else {name: (shape, dtype)}
        return found

    def tensors(self) -> Any:
        for name, read in self.inner.tensors():
            if not of_a_linear(name):
                yield name, read
                continue
            weight, scale = quantize(read())
            yield name.removesuffix("weight") + "qweight", lambda weight=weight: weight
            yield name.removesuffix("weight") + "scale", lambda scale=scale: scale


INT8 = QuantMethodSpec(name="int8", make=f"{__name__}:Int8", reads=f"{__name__}:is_int8", plain=True)


def with_int8() -> Registry:
    found = registry_for_tests()
    found.take(INT8, OWNER)
    found.take(ModeSpec(name="int8-weights", quant="int8"), OWNER)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A plain checkpoint, the same with int8 weights, and a transformers model with what those mean."""
    plain, stored = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("int8")
    theirs = small_model("LlamaForCausalLM", tie_word_embeddings=False)
    theirs.save_pretrained(plain)
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if of_a_linear(name):
            weight, scale = quantize(tensor)
            tensors |= {name.replace("weight", "qweight"): weight, name.replace("weight", "scale"): scale}
        else:
            tensors[name] = tensor
    save_file(tensors, stored / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "int8"}}))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if of_a_linear(name):
                weight, scale = quantize(parameter)
                parameter.copy_(weight.float() * scale.unsqueeze(1))
    return plain, stored, theirs


def test_linears_hold_what_the_method_says(models: tuple[Path, Path, Any]) -> None:
    _, stored, theirs = models
    prompt = [5, 99, 3, 77, 20, 41, 8]
    ours = LoadedModel(stored, registry=with_int8())
    assert ours.model.get_submodule("layers.0.self_attn.qkv_proj").qweight.dtype == torch.int8
    got, want = ours.generate(prompt, 5), oracle(theirs, prompt, 5)
    assert got.tokens == want.tokens
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-4)


def test_a_mode_quantizes_a_plain_checkpoint_as_it_is_read(models: tuple[Path, Path, Any]) -> None:
    plain, stored, _ = models
    found = with_int8()
    settings = make_config(model_dir=str(plain), mode=("int8-weights",), device="cpu")
    loaded = load_model(settings, found, pick_device(found, "cpu"), lambda stage, done, total: None)
    assert loaded.quant == "int8"
    ours = dict(loaded.model.named_parameters())
    theirs = dict(LoadedModel(stored, registry=found).model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter), name
    half = next(parameter for name, parameter in theirs.items() if name.endswith("qweight"))
    assert half.dtype == torch.int8 and half.any()


def test_drawn_codes_are_random_and_their_weights_have_the_usual_size(models: tuple[Path, Path, Any]) -> None:
    _, stored, _ = models
    ours = LoadedModel(stored, registry=with_int8(), dummy=True)
    linear = ours.model.get_submodule("layers.0.mlp.gate_up_proj")
    weight = linear.qweight.float() * linear.scale[:, None]
    assert len(linear.qweight.unique()) > 200
    assert abs(float(weight.std()) - 0.02) < 0.001
    assert bool(ours.all_logits([5, 99, 3]).isfinite().all())


def test_int8_weights_are_counted_as_they_are_held(models: tuple[Path, Path, Any]) -> None:
    """By the plan from headers, by the plan of a mode, and after loading; not by the bytes of the model's type."""
    plain, stored, theirs = models
    found = with_int8()
    linears = sum(p.numel() for name, p in theirs.named_parameters() if of_a_linear(name))
    rows = sum(p.shape[0] for name, p in theirs.named_parameters() if of_a_linear(name))
    others = sum(p.numel() for name, p in theirs.named_parameters() if not of_a_linear(name))
    for folder, mode in ((stored, ()), (plain, ("int8-weights",))):
        settings = make_config(model_dir=str(folder), mode=mode, device="cpu", data_type="bf16")
        planned = make_plan(settings, found, None)
        assert planned.quant == "int8" and planned.budget.parameters == linears + others
        assert planned.budget.weights == linears + rows * 4 + others * 2
        assert planned.budget.bits_per_weight == 8 * planned.budget.weights / (linears + others) < 16
        loaded = load_model(settings, found, pick_device(found, "cpu"), lambda stage, done, total: None)
        assert (loaded.weights.parameters, loaded.weights.bytes) == (linears + others, planned.budget.weights)
    unquantized = make_plan(make_config(model_dir=str(plain), device="cpu", data_type="bf16"), found, None)
    assert unquantized.budget.weights == (linears + others) * 2 and unquantized.quant is None
    assert unquantized.budget.activations == planned.budget.activations
