"""Modes that quantize a plain checkpoint while it loads: what is quantized, what it means, and what does not fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api import ConfigError, ModeSpec
from llmcore.cli import main
from llmcore_devtools import check_plugin
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.family import assert_same, oracle, small_model
from llmcore_devtools.loaded_model import LoadedModel, Row, registry_for_tests
from llmcore_quantization import online, register_modes
from llmcore_quantization.canonical import Scheme

REGISTRY = registry_for_tests()
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
PROMPT = [5, 99, 3, 77, 20, 41, 8, 1, 64]

Rounding = Callable[[torch.Tensor], torch.Tensor]


# --- a second implementation of every rounding, over [..., group] ------------------------------------------------


def asymmetric(x: torch.Tensor) -> torch.Tensor:
    high, low = x.amax(-1, keepdim=True).clamp(min=0), x.amin(-1, keepdim=True).clamp(max=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round()
    return ((x / scale).round().clamp(-zero, 15 - zero)) * scale


def symmetric(x: torch.Tensor) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 7.5).half().float()
    return (x / scale).round().clamp(-8, 7) * scale


def int8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def float8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def by(group: int, rounding: Rounding) -> Rounding:
    return lambda x: rounding(x.reshape(*x.shape[:-1], -1, group)).reshape(x.shape)


def blocks(x: torch.Tensor) -> torch.Tensor:
    """The last block may have fewer rows."""
    parts = [
        float8(square.reshape(1, -1)).view(square.shape) for rows in x.split(128) for square in rows.split(128, dim=1)
    ]
    columns = x.shape[1] // 128
    return torch.cat([torch.cat(parts[first : first + columns], 1) for first in range(0, len(parts), columns)])


CASES: Mapping[tuple[str, ...], tuple[Rounding, Rounding | None, tuple[str, ...]]] = {
    ("triton_w4a16",): (by(128, asymmetric), None, ()),
    ("triton_w4a16", "g32"): (by(32, asymmetric), None, ()),
    ("g64", "triton_int4weight"): (by(64, asymmetric), None, ()),
    ("ppl_w4a16", "g64"): (by(64, symmetric), None, ()),
    ("triton_w8a16",): (int8, None, ()),
    ("triton_w8a8",): (int8, int8, ()),
    ("ppl_w8a8",): (int8, int8, ("o_proj",)),
    ("ppl_w8a8_mixdown",): (int8, int8, ("o_proj", "layers.1.mlp.down_proj")),
    ("fp8w8a8",): (float8, float8, ()),
    ("fp8w8a8_b128",): (blocks, by(128, float8), ()),
}
"""Modes -> rounding of weights, rounding of inputs, and the modules that stay plain."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain Llama with biases, and without tied embeddings. Its config.json lists layers for mixdown."""
    path = tmp_path_factory.mktemp("plain")
    small_model("LlamaForCausalLM", **SIZES, head_dim=16, attention_bias=True).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "mixdown": [1]}))
    return path


def rounded_model(weights: Rounding, inputs: Rounding | None, plain: tuple[str, ...]) -> Any:
    theirs = small_model("LlamaForCausalLM", **SIZES, head_dim=16, attention_bias=True)
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name and not name.endswith(plain or ("-",)):
            module.weight.data.copy_(weights(module.weight.data))
            if inputs is not None:
                module.register_forward_pre_hook(lambda _, given, inputs=inputs: (inputs(given[0]),))
    return theirs


@pytest.mark.parametrize("modes", CASES, ids=" ".join)
def test_logits_are_those_of_the_rounded_weights(folder: Path, modes: tuple[str, ...]) -> None:
    weights, inputs, plain = CASES[modes]
    ours, theirs = LoadedModel(folder, modes=modes, registry=REGISTRY), rounded_model(weights, inputs, plain)
    # An input between two codes becomes either, by the last bits of the sums before it; logits then differ by a step.
    tolerance = 1e-4 if inputs is None else 2e-2
    for new, chunk in ((4, None), (1, 4)):
        got, expected = ours.generate(PROMPT, new, chunk=chunk), oracle(theirs, PROMPT, new)
        if inputs is None:
            assert_same(" ".join(modes), got, expected, tolerance)
        else:
            error = (got.logits[0] - expected.logits[0]).norm() / expected.logits[0].norm()
            assert error < tolerance, error


def test_a_request_is_computed_alike_alone_and_beside_others(folder: Path) -> None:
    """Inputs are rounded by token, so no row changes another by more than the order of its sums."""
    for mode in ("triton_w4a16", "triton_w8a8", "fp8w8a8_b128"):
        ours = LoadedModel(folder, modes=(mode,), registry=REGISTRY)
        alone = ours.step([Row(0, tuple(PROMPT), 0, len(PROMPT))])[0]
        others = [Row(1, (7,) * 20, 0, 20), Row(2, (100, 3), 0, 2)]
        beside = ours.step([others[0], Row(3, tuple(PROMPT), 0, len(PROMPT)), others[1]])[1]
        torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("modes", CASES, ids=" ".join)
def test_dummy_weights_have_the_tensors_of_loaded_ones(folder: Path, modes: tuple[str, ...]) -> None:
    drawn = LoadedModel(folder, modes=modes, registry=REGISTRY, dummy=True)
    loaded = LoadedModel(folder, modes=modes, registry=REGISTRY)
    named = {name: (tensor.shape, tensor.dtype) for name, tensor in loaded.model.named_parameters()}
    if "mixdown" not in modes[0]:
        assert named == {name: (tensor.shape, tensor.dtype) for name, tensor in drawn.model.named_parameters()}
    assert drawn.generate(PROMPT, 2).logits[1].isfinite().all()


def test_only_linears_of_layers_are_quantized(folder: Path) -> None:
    held = dict(LoadedModel(folder, modes=("triton_w4a16",), registry=REGISTRY).model.named_parameters())
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


# --- modes -------------------------------------------------------------------------------------------------------


def test_every_weight_mode_of_lightllm_is_there() -> None:
    seeds = json.loads((Path(__file__).parents[1] / "data" / "seed_options.json").read_text())
    names = {mode.name for mode in register_modes()}
    weights = {name for name in _texts(seeds) if "_w4a16" in name or "_w8a" in name or name.endswith("weight")}
    assert len(weights) >= 10 and weights <= names


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and " " not in value and value.startswith(("triton_", "ppl_", "lmdeploy_")):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def test_conformance(folder: Path) -> None:
    assert check_plugin(REGISTRY, "quantization", [folder])["register_modes"] >= 16


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        (("triton_w4a16", "g65"), "--mode g65: there is no such mode"),
        (("triton_w4a16", "g32", "g64"), "--mode g32 pins quant option group to 32, --mode g64 to 64"),
        (("g64",), "--mode g64 chooses the group of a mode that quantizes weights.*give one beside it: fp8w8a8"),
        (("triton_w8a16", "g64"), "--mode triton_w8a16 does not fit.*no group to choose"),
        (("triton_w4a16", "triton_w8a8"), "--mode triton_w4a16 pins quant to 'online_w4a16', --mode triton_w8a8 to"),
    ],
)
def test_modes_that_do_not_go_together(folder: Path, modes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadedModel(folder, modes=modes, registry=REGISTRY)


def test_a_group_that_does_not_divide_names_those_that_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model("LlamaForCausalLM", **{**SIZES, "intermediate_size": 192}, head_dim=16).save_pretrained(tmp_path)
    message = "down_proj: groups of 128 inputs do not divide 192; groups of 64 or 32 do"
    for modes in (("triton_w4a16",), ("fp8w8a8_b128",)):
        with pytest.raises(ConfigError, match=f"--mode {modes[0]} does not fit LlamaForCausalLM on cpu.*{message}"):
            LoadedModel(tmp_path, modes=modes, registry=REGISTRY)
    assert LoadedModel(tmp_path, modes=("triton_w4a16", "g64"), registry=REGISTRY).generate(PROMPT, 1).tokens
    with pytest.raises(SystemExit, match="0"):
        main(["modes", "--model", str(tmp_path), "--device", "cpu", "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert message in rows["triton_w4a16"]["misfit"] and rows["triton_w8a8"]["misfit"] is None
    assert rows["g64"]["quant_options"] == {"group": 64} and rows["g64"]["misfit"] is None
    assert rows["ppl_w8a8"]["quant"] == "online_w8a8_plain_o"


def test_modes_are_data() -> None:
    assert all(isinstance(mode, ModeSpec) and not mode.kernels and mode.layout is None for mode in register_modes())
