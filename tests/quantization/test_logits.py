"""The engine on quantized checkpoints: its logits are those of transformers on the weights that a witness read.

The witness is that of the packers. Hooks round the inputs of transformers' linears as the format's definition says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import packers
import pytest
import torch
import witness
from llmcore.api import ConfigError
from llmcore_devtools.family import assert_same, oracle, small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from packers import CASES, Case, Tensors
from safetensors.torch import load_file

REGISTRY = registry_for_tests()
LLAMA = "LlamaForCausalLM"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PROMPT = [5, 99, 3, 77, 20, 41, 8, 1, 64]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Change = Callable[[Tensors], None]


class Pair:
    """A small model of transformers, and a checkpoint in `folder` in which its linears are quantized.

    `left`: names of weights that stay plain. `more`: for the quantization_config. The model has the weights that the
    checkpoint means.
    """

    def __init__(
        self,
        folder: Path,
        case: Case,
        architecture: str = LLAMA,
        *,
        left: Sequence[str] = (),
        cases: Mapping[str, Case] | None = None,
        more: Mapping[str, Any] | None = None,
        **sizes: Any,
    ) -> None:
        self.folder, self.case, sizes = folder, case, {"num_hidden_layers": 2, **SIZES, **sizes}
        plain = small_model(architecture, **sizes)
        plain.save_pretrained(folder)
        stored, means = packers.packed_model(load_file(folder / "model.safetensors"), case, left, cases)
        self.stored = stored
        self.config = json.loads((folder / "config.json").read_text())
        self.config["quantization_config"] = {**case.config, **(more or {})}
        packers.write(folder, self.config, stored)
        meant = folder.with_name(f"{folder.name} as meant")
        packers.write(meant, {**self.config, "quantization_config": None}, means)
        self.theirs = type(plain).from_pretrained(meant, dtype=torch.float32).eval()
        self.theirs.config._experts_implementation = "eager"  # as small_model has it
        self._round_inputs()

    def _round_inputs(self) -> None:
        scales = {name.rpartition(".")[0]: t for name, t in self.stored.items() if name.endswith("input_scale")}
        for name, module in self.theirs.named_modules():
            if self.case.inputs != "plain" and f"{name}.weight" in self.stored and name.endswith("_proj"):
                parent, _, own = name.rpartition(".")
                alike = next((parts for parts in FUSED if own in parts), (own,))
                static = max((scales[f"{parent}.{part}"].item() for part in alike), default=None) if scales else None
                limit = 127 if self.stored[f"{name}.weight"].dtype == torch.int8 else 448
                module.register_forward_pre_hook(_rounding(self.case.inputs, limit, static))

    def check(self, new: int = 3) -> LoadedModel:
        ours = LoadedModel(self.folder, registry=REGISTRY)
        got, expected = ours.generate(PROMPT, new), oracle(self.theirs, PROMPT, new)
        if self.case.inputs == "plain":
            assert_same("quantized", got, expected, 1e-4)
            return ours
        # An input between two codes becomes either, by the last bits of the sums before it.
        error = (got.logits[0] - expected.logits[0]).norm() / expected.logits[0].norm()
        assert error < 5e-3, error
        return ours


def _rounding(kind: str, limit: int, static: float | None) -> Callable[..., tuple[torch.Tensor]]:
    def hook(module: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = given[0].unflatten(-1, (-1, 32)) if kind == "group" else given[0]
        scale = x.abs().amax(-1, keepdim=True) / limit if static is None else torch.tensor(static)
        steps = (x / scale).clamp(-128 if limit == 127 else -limit, limit)
        codes = steps.round() if limit == 127 else steps.to(torch.float8_e4m3fn).float()
        return ((codes * scale).view_as(given[0]),)

    return hook


def codes_in(model: LoadedModel) -> set[str]:
    """The linears of layer 0, and the head, whose codes are kept."""
    names = (name for name, _ in model.model.named_parameters() if name.endswith(".codes"))
    return {name.removesuffix(".codes") for name in names if ".0." in f".{name}" or "layers" not in name}


ALL = {
    "layers.0.self_attn.qkv_proj",
    "layers.0.self_attn.o_proj",
    "layers.0.mlp.gate_up_proj",
    "layers.0.mlp.down_proj",
}

PLAIN = {
    "ct, mxfp4": ALL,
    "gptq, desc_act, an order for each": ALL - {"layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"},
}
"""Case -> the linears whose codes cannot be kept."""

GROUPED_OTHERWISE = {"fp8, blocks beyond the edges"}
"""Inputs have the groups of the weights, and blocks of 48 x 128 leave groups of 64 and 32 here."""


@pytest.mark.parametrize("name", sorted(CASES.keys() - GROUPED_OTHERWISE))
def test_every_format(name: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path / "model", CASES[name], attention_bias=True, mlp_bias=True)
    assert codes_in(pair.check()) == ALL - PLAIN.get(name, set())


@pytest.mark.parametrize("name", CASES)
def test_drawn_weights(name: str, tmp_path: Path) -> None:
    """Of `--load_format dummy` and `llmcore plan`, which may know the config alone: held as those of the checkpoint.

    The dtype of the scales is not known, nor whether linears that desc_act sorts have one order.
    """
    pair = Pair(tmp_path / "model", CASES[name], num_hidden_layers=1)
    loaded = LoadedModel(pair.folder, registry=REGISTRY).model
    (pair.folder / "model.safetensors").unlink()
    drawn = LoadedModel(pair.folder, registry=REGISTRY, dummy=True)
    assert drawn.all_logits(PROMPT).isfinite().all()
    if not name.endswith("an order for each"):
        assert _held(drawn.model) == _held(loaded)


def _held(model: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    found = model.named_parameters()
    return {name: (tuple(t.shape), None if name.endswith("scale") else t.dtype) for name, t in found}


OTHERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "biases on q, k and v, tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "stacks in the checkpoint": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "pairs of neighbours rotate": ("CohereForCausalLM", {}),
}


@pytest.mark.parametrize("name", ["gptq, desc_act", "ct, 8 bits, asymmetric"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_families(name: str, family: str, tmp_path: Path) -> None:
    architecture, sizes = OTHERS[family]
    assert codes_in(Pair(tmp_path / "model", CASES[name], architecture, **sizes).check()) == ALL


EXPERTS: Mapping[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Qwen2MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    "DeepseekV3ForCausalLM": {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    | {"v_head_dim": 16, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("name", ["awq", "gptq, desc_act, asymmetric", "ct, fp8 per block"])
@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts(name: str, architecture: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path / "model", CASES[name], architecture, **EXPERTS[architecture])
    assert any(".experts.0." in module and module.endswith(("scales", "weight_scale")) for module in pair.stored)
    assert not any("mlp.gate." in module and "scale" in module for module in pair.stored)
    kept = codes_in(pair.check())
    assert "layers.0.self_attn.o_proj" in kept


GPT2 = Path(__file__).resolve().parents[2] / "docs" / "examples" / "gpt2" / "gpt2.py"


@pytest.mark.parametrize("name", ["gptq, desc_act, an order for each", "ct, mxfp4", "triton_w8a16"])
def test_a_family_that_saves_its_linears_transposed(name: str, tmp_path: Path) -> None:
    """Quantized tensors and what they mean have their outputs first; modes quantize the rows of outputs."""
    theirs = small_model("GPT2LMHeadModel", num_hidden_layers=1, n_inner=96, **SIZES)
    theirs.save_pretrained(tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), packers.read_config(tmp_path)
    linears = {name: tensor.t() for name, tensor in tensors.items() if name.endswith(("attn.weight", "c_fc.weight"))}
    linears |= {name: tensor.t() for name, tensor in tensors.items() if name.endswith("c_proj.weight")}
    if name in CASES:
        case = CASES[name]
        stored, means = packers.packed_model(linears, case, cases={n.removesuffix(".weight"): case for n in linears})
        tensors = {n: tensor for n, tensor in tensors.items() if n not in linears}
        packers.write(tmp_path, {**config, "quantization_config": case.config}, {**tensors, **stored})
    else:
        means = {name: witness.int8(weight) for name, weight in linears.items()}
    theirs.load_state_dict({name: weight.t() for name, weight in means.items()}, strict=False)
    registry = registry_for_tests(["quantization", str(GPT2)])
    ours = LoadedModel(tmp_path, registry=registry, modes=() if name in CASES else (name,))
    assert_same(name, ours.generate(PROMPT, 3), oracle(theirs, PROMPT, 3), 1e-4)


def test_widths_that_end_within_a_word_and_within_a_byte(tmp_path: Path) -> None:
    sizes = {"hidden_size": 60, "intermediate_size": 35}
    for index, case in enumerate((packers.ct_words(group=0), packers.ct_words(group=0, sym=False))):
        ours = Pair(tmp_path / str(index), case, **sizes).check().model.layers["0"].mlp
        assert ours.gate_up_proj.codes.dtype == torch.uint8 and ours.down_proj.codes.dtype == torch.int8


def test_groups_that_do_not_divide_the_inputs(tmp_path: Path) -> None:
    """The last group is short. Weights whose groups have too small a common divisor with the inputs become plain."""
    for index, inner in enumerate((96, 72)):
        case = packers.ct_words(group=64, sym=False)
        pair = Pair(tmp_path / str(index), case, intermediate_size=inner)
        assert codes_in(pair.check()) == ALL - ({"layers.0.mlp.down_proj"} if inner == 72 else set())


def test_a_quantized_head(tmp_path: Path) -> None:
    for index, case in enumerate((packers.gptq(), packers.ct_words())):
        more = {"lm_head": True} if index == 0 else {"ignore": []}
        pair = Pair(tmp_path / str(index), case, cases={"lm_head": case}, more=more, tie_word_embeddings=False)
        assert codes_in(pair.check()) == ALL | {"lm_head"}


def test_ignored_modules_and_mixed_bits(tmp_path: Path) -> None:
    """Regexes name 8 bits for two kinds of modules; a layer and a kind of module stay plain."""
    four, eight = packers.ct_words(), packers.ct_words(8, 0)
    groups = [{**case.config["config_groups"]["group_0"]} for case in (four, eight)]
    groups[1]["targets"] = [r"re:.*self_attn\.(q|k|v)_proj$", "model.layers.0.mlp.down_proj"]
    ignored = ["lm_head", r"re:.*layers\.1\..*", "model.layers.0.self_attn.o_proj"]
    more = {"config_groups": {"a": groups[0], "b": groups[1]}, "ignore": ignored, "format": "mixed-precision"}
    attention = "model.layers.0.self_attn."
    cases = {f"{attention}{part}_proj": eight for part in "qkv"} | {"model.layers.0.mlp.down_proj": eight}
    left = [name for name in _weights() if ".layers.1." in name or name == f"{attention}o_proj.weight"]
    pair = Pair(tmp_path / "model", four, left=left, cases=cases, more=more)
    held = dict(pair.check().model.named_parameters())
    assert {name: held[f"{name}.codes"].dtype for name in ALL if f"{name}.codes" in held} == {
        "layers.0.self_attn.qkv_proj": torch.int8,
        "layers.0.mlp.gate_up_proj": torch.uint8,
        "layers.0.mlp.down_proj": torch.int8,
    }
    assert not any(name.startswith("layers.1") and name.endswith("codes") for name in held)


def test_gptq_overrides_modules(tmp_path: Path) -> None:
    four, eight = packers.gptq(), packers.gptq(8, sym=False)
    dynamic = {r"-:.*\.o_proj": {}, r"+:.*\.down_proj": {"bits": 8, "sym": False}}
    cases = {f"model.layers.{layer}.mlp.down_proj": eight for layer in range(2)}
    left = [name for name in _weights() if "o_proj" in name]
    ours = Pair(tmp_path / "model", four, left=left, cases=cases, more={"dynamic": dynamic}).check()
    assert codes_in(ours) == ALL - {"layers.0.self_attn.o_proj"}
    assert ours.model.layers["0"].mlp.down_proj.codes.dtype == torch.int8


def _weights() -> list[str]:
    parts = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
    return [
        f"model.layers.{layer}.{module}.{part}_proj.weight"
        for layer in range(2)
        for module, found in parts.items()
        for part in found
    ]


# --- biases ------------------------------------------------------------------------------------------------------


def with_biases(pair: Pair, value: float) -> None:
    """As AutoGPTQ saves them: one for every linear, also where the model has none."""
    modules = {name.removesuffix(".qweight"): t.shape[1] for name, t in pair.stored.items() if "qweight" in name}
    zeros = {f"{module}.bias": torch.zeros(outputs) for module, outputs in modules.items()}
    packers.write(
        pair.folder, pair.config, zeros | {"model.layers.1.mlp.up_proj.bias": torch.full((96,), value)} | pair.stored
    )


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "MixtralForCausalLM"])
def test_biases_of_zeros_where_the_model_has_none(architecture: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path / "model", packers.gptq(), architecture, **EXPERTS.get(architecture, {}))
    with_biases(pair, 0)
    pair.check()


def test_other_biases_where_the_model_has_none(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "model", packers.gptq())
    with_biases(pair, 0.5)
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.1\.mlp\.up_proj\.bias\. Check that"):
        LoadedModel(pair.folder, registry=REGISTRY)


# --- config.json and the weights disagree ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"intermediate_size": 80}, r"down_proj has 96 inputs in the checkpoint, and 80 by config\.json; download"),
        ({"hidden_size": 96}, r"norm\.weight is \[64\], norm\.weight needs \[96\].*Check that config\.json belongs"),
        (
            {"num_key_value_heads": 1},
            r"k_proj\.codes is \[32, 32\], .*needs \[16, 32\].*Check that config\.json belongs",
        ),
        ({"num_hidden_layers": 3}, r"missing: .*layers\.2.* Check that config\.json belongs to the weights"),
    ],
)
def test_another_config(sizes: dict[str, Any], message: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path / "model", CASES["awq"])
    packers.write(pair.folder, {**pair.config, **sizes}, pair.stored)
    with pytest.raises(ConfigError, match=message):
        LoadedModel(pair.folder, registry=REGISTRY)


FILES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "quantize_config.json": (
        "gptq",
        {"bits": 4, "group_size": 32, "sym": True, "desc_act": False, "damp_percent": 0.1},
    ),
    "quant_config.json": ("awq", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    "hf_quant_config.json": ("autofp8", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}),
}


@pytest.mark.parametrize("file", [*FILES, "text_config", "compression_config"])
def test_where_the_config_is(file: str, tmp_path: Path) -> None:
    name, content = FILES.get(file, ("ct, 4 bits", {}))
    pair = Pair(tmp_path / "model", CASES[name])
    config = dict(pair.config)
    found = config.pop("quantization_config")
    places = {"text_config": {"text_config": {"quantization_config": found}}, "compression_config": {file: found}}
    packers.write(pair.folder, {**config, **places.get(file, {})}, pair.stored)
    if file in FILES:
        (pair.folder / file).write_text(json.dumps(content))
    assert codes_in(pair.check()) == ALL
