"""Modes that quantize a plain checkpoint while it loads: what is quantized, what it means, and what does not fit."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api import ConfigError
from llmcore.engine.llm import LLM
from llmcore.weights.load import load_weights
from llmcore.weights.map import WeightMap
from llmcore_devtools import check_plugin
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.family import assert_same, oracle, small_model
from llmcore_devtools.loaded_model import LoadedModel, Row, registry_for_tests
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_quantization import online
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.checkpoint import DTYPE_NAMES
from llmcore_quantization.rounding import quantized
from witness import MODES, rounded_model

REGISTRY = registry_for_tests()
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
PROMPT = [5, 99, 3, 77, 20, 41, 8, 1, 64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain Llama. Its config.json lists layers for mixdown."""
    path = tmp_path_factory.mktemp("plain")
    plain_model().save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "mixdown": [1]}))
    return path


def plain_model() -> Any:
    """A Llama with biases, and without tied embeddings."""
    return small_model("LlamaForCausalLM", **SIZES, head_dim=16, attention_bias=True)


def loaded(folder: Path, modes: str, **more: Any) -> LoadedModel:
    return LoadedModel(folder, modes=modes.split(), registry=REGISTRY, **more)


@pytest.mark.parametrize("modes", MODES)
def test_logits_are_those_of_the_rounded_weights(folder: Path, modes: str) -> None:
    ours, theirs = loaded(folder, modes), rounded_model(plain_model(), MODES[modes])
    # An input between two codes becomes either, by the last bits of the sums before it; logits then differ by a step.
    only_weights = MODES[modes].inputs is None
    for new, chunk in ((4, None), (1, 4)):
        got, expected = ours.generate(PROMPT, new, chunk=chunk), oracle(theirs, PROMPT, new)
        if only_weights:
            assert_same(modes, got, expected, 1e-4)
        else:
            error = (got.logits[0] - expected.logits[0]).norm() / expected.logits[0].norm()
            assert error < 2e-2, error


def test_a_request_is_computed_alike_alone_and_beside_others(folder: Path) -> None:
    """Inputs are rounded by token, so no row changes another by more than the order of its sums."""
    for mode in ("triton_w4a16", "triton_w8a8", "fp8w8a8_b128"):
        ours = loaded(folder, mode)
        alone = ours.step([Row(0, tuple(PROMPT), 0, len(PROMPT))])[0]
        others = [Row(1, (7,) * 20, 0, 20), Row(2, (100, 3), 0, 2)]
        beside = ours.step([others[0], Row(3, tuple(PROMPT), 0, len(PROMPT)), others[1]])[1]
        torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("modes", MODES)
def test_dummy_weights_have_the_tensors_of_loaded_ones(folder: Path, modes: str) -> None:
    drawn, filled = loaded(folder, modes, dummy=True), loaded(folder, modes)
    named = {name: (tensor.shape, tensor.dtype) for name, tensor in filled.model.named_parameters()}
    assert named == {name: (tensor.shape, tensor.dtype) for name, tensor in drawn.model.named_parameters()}
    assert drawn.generate(PROMPT, 2).logits[1].isfinite().all()


def test_norms_and_activations_write_what_linears_with_quantized_inputs_take(folder: Path) -> None:
    """A model whose linears take tensors, plain or with codes alone, asks for the ops that it always did."""
    writers = {"rms_norm_quant", "add_rms_norm_quant", "silu_and_mul_quant"}
    for mode, wanted in (("triton_w8a8", writers), ("fp8w8a8_b128", writers), ("triton_w4a16", set()), ("", set())):
        resolved = {resolution.context.op for resolution in loaded(folder, mode).build.resolutions}
        assert {op for op in resolved if op.endswith("_quant")} == wanted
        assert ("linear.w4a16_silu_and_mul" in resolved) == (mode == "triton_w4a16")
        assert ("linear_silu_and_mul" in resolved) == (mode == "")


def test_only_linears_of_layers_are_quantized(folder: Path) -> None:
    held = dict(loaded(folder, "triton_w4a16").model.named_parameters())
    assert {name.rpartition(".")[0] for name in held if name.endswith(".codes")} == {
        f"layers.{layer}.{module}"
        for layer in range(3)
        for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert held["layers.0.mlp.gate_up_proj.codes"].shape == (512, 64)
    assert held["embed_tokens.weight"].dtype == torch.float32


# --- the checkpoint ----------------------------------------------------------------------------------------------


class Plain:
    """A checkpoint of random tensors that notes which were read."""

    def __init__(self, config: Mapping[str, Any], **sizes: tuple[int, ...]) -> None:
        self.described = dict(config)
        self.held = {
            name.replace("__", "."): torch.randn(size, generator=torch.Generator().manual_seed(1))
            for name, size in sizes.items()
        }
        self.read: list[str] = []

    def config(self) -> dict[str, Any]:
        return self.described

    def generation_config(self) -> dict[str, Any]:
        return {"temperature": 0.5}

    def sizes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (tuple(tensor.shape), "F32") for name, tensor in self.held.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name in self.held:
            yield name, partial(self._read, name)

    def _read(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.held[name]


def test_a_weight_is_read_once_and_becomes_canonical_tensors() -> None:
    plain = Plain({}, a__0__q__weight=(6, 128), a__0__q__bias=(6,), head__weight=(4, 8))
    method = online.w4a16({}, CONFIG)
    checkpoint = method.checkpoint(plain, torch.device("cpu"))
    assert method.method_for(["head"]) is None
    found = method.method_for(["a.0.q"])
    assert found is not None and found.scheme == Scheme(codes="u4", group=128, zeros=True)
    sizes = checkpoint.sizes()
    assert sizes == {
        "a.0.q.codes": ((6, 64), "U8"),
        "a.0.q.scale": ((6, 1), "F16"),
        "a.0.q.zero": ((6, 1), "U8"),
        "a.0.q.bias": ((6,), "F32"),
        "head.weight": ((4, 8), "F32"),
    }
    tensors = {name: read() for name, read in checkpoint.tensors()}
    assert list(tensors) == list(sizes) and plain.read == ["a.0.q.weight", "a.0.q.bias", "head.weight"]
    for name, (shape, _) in sizes.items():
        assert tuple(tensors[name].shape) == shape
    assert checkpoint.config() is plain.described and checkpoint.generation_config() == {"temperature": 0.5}


def test_tensors_that_are_not_wanted_are_not_read() -> None:
    plain = Plain({}, a__0__q__weight=(6, 128))
    method = online.w8a8({}, CONFIG)
    checkpoint = method.checkpoint(plain, torch.device("cpu"))
    method.method_for(["a.0.q"])
    assert [name for name, _ in checkpoint.tensors()] == ["a.0.q.codes", "a.0.q.scale"] and not plain.read


def test_modules_that_stay_plain() -> None:
    def quantized(method: online.Online, config: Mapping[str, Any]) -> list[str]:
        method.checkpoint(Plain(config), torch.device("cpu"))
        names = [
            f"model.layers.{n}.{m}" for n in range(2) for m in ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj")
        ]
        return [name.removeprefix("model.layers.") for name in names if method.method_for([name])]

    up = ["0.mlp.up_proj", "1.mlp.up_proj"]
    both = ["0.mlp.down_proj", "0.mlp.up_proj", "1.mlp.down_proj", "1.mlp.up_proj"]
    assert quantized(online.w8a8_plain_o({}, CONFIG), {}) == both
    assert quantized(online.w8a8_mixdown({}, CONFIG), {}) == up
    assert quantized(online.w8a8_mixdown({}, CONFIG), {"mixdown": [0]}) == [up[0], *both[2:]]
    assert quantized(online.w8a8_mixdown({}, CONFIG), {"mixdown": []}) == both
    with pytest.raises(ConfigError, match=r"mixdown in config\.json is '1,2' and has to be a list"):
        quantized(online.w8a8_mixdown({}, CONFIG), {"mixdown": "1,2"})


def test_a_weight_of_another_shape_than_the_config_says() -> None:
    method = online.w4a16({}, CONFIG)
    checkpoint = method.checkpoint(Plain({}, a__0__q__weight=(6, 100), a__0__norm__weight=(6,)), torch.device("cpu"))
    assert method.method_for(["a.0.q"]) and method.method_for(["a.0.norm"]) is None
    with pytest.raises(
        ConfigError, match=r"a.0.q.weight is \[6, 100\] and cannot be quantized: groups of 128 inputs do"
    ):
        checkpoint.sizes()


def test_small_models_are_warned_of_4_bits(caplog: pytest.LogCaptureFixture) -> None:
    for make, warned in ((online.w4a16, True), (online.w4a16_symmetric, True), (online.w8a16, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            checkpoint = make({}, CONFIG).checkpoint(Plain({}, a__weight=(3000, 1000)), torch.device("cpu"))
            assert not caplog.text  # the plan of a start asks for the checkpoint too
            list(checkpoint.tensors())
        assert ("The model has 3 million parameters" in caplog.text) is warned


# --- the start -----------------------------------------------------------------------------------------------------


class Fresh(Plain):
    """A checkpoint that makes every tensor when it is read, in bf16, and fails if the one before is still held."""

    def __init__(self, **sizes: tuple[int, ...]) -> None:
        super().__init__({}, **sizes)
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def _read(self, name: str) -> torch.Tensor:
        assert not [held for held in self.alive if held() is not None], f"held when {name} is read"
        made = super()._read(name).bfloat16()
        self.alive = [weakref.ref(made)]
        return made


def test_one_tensor_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a weight was quantized: nothing of the checkpoint and no codes when the next tensor is read."""
    sizes = {f"layers__{n}__{leaf}": size for n in range(2) for leaf, size in (("q__weight", (64, 128)), ("n", (64,)))}
    plain, method = Fresh(**sizes), online.w4a16({}, CONFIG)
    checkpoint = method.checkpoint(plain, torch.device("cpu"))
    assert method.method_for(["layers.0.q"]) and method.method_for(["layers.1.q"])

    def watched(*given: Any) -> dict[str, torch.Tensor]:
        made = quantized(*given)
        plain.alive += [weakref.ref(tensor) for tensor in made.values()]
        return made

    monkeypatch.setattr(online, "quantized", watched)
    model = torch.nn.Module()
    for name, (shape, dtype) in checkpoint.sizes().items():
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=NAMED[dtype]), requires_grad=False)
        add(model, name, parameter)
    assert load_weights(model, checkpoint, WeightMap()).tensors == 8
    assert len(plain.read) == 4


NAMED = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def add(model: torch.nn.Module, path: str, parameter: torch.nn.Parameter) -> None:
    for name in path.split(".")[:-1]:
        if name not in dict(model.named_children()):
            model.add_module(name, torch.nn.Module())
        model = model.get_submodule(name)
    model.register_parameter(path.rpartition(".")[2], parameter)


@pytest.mark.parametrize("modes", ["triton_w4a16", "triton_w8a8", "fp8w8a8_b128"])
def test_the_progress_counts_what_is_filled(folder: Path, modes: str) -> None:
    seen: list[tuple[int, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "weights":
            seen.append((done, total))

    write_tokenizer(folder)
    LLM(folder, device="cpu", data_type="fp32", mode=(modes,), progress=progress).close()
    *steps, (last, total) = seen
    assert last == total and len(steps) > 30
    assert [done for done, _ in steps] == sorted({done for done, _ in steps}), "every tensor counts"
    assert steps[-1] == (total, total), "the parts are the whole, before the end says so"


def test_conformance(folder: Path) -> None:
    assert check_plugin(REGISTRY, "quantization", [folder])["register_modes"] >= 16
