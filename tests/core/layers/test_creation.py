"""Which modules of a checkpoint a linear is, and which linears a quantization method is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from built import build
from llmcore.api.errors import ConfigError
from llmcore.api.specs import DeviceInfo, PluginInfo, QuantMethodSpec
from llmcore.engine.blueprint import blueprint_at
from llmcore.layers import Bound, Build, Embedding, Linear, LinearShape, LMHead, Mesh, Unquantized, create_linears
from llmcore.registry.modes import Pins
from llmcore.weights.map import Shard, WeightMap
from llmcore_devtools.family import SMALL_LATENT, small_model
from llmcore_devtools.loaded_model import registry_for_tests
from torch import nn

QKV = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
NAMES = WeightMap(
    rename={"model.layers.": "layers.", "model.": ""},
    suffix={"attn.out": "attn.o_proj"},
    fuse={"qkv_proj": tuple(QKV)},
)


class Method:
    """Plain linears; remembers which."""

    activations: frozenset[str] = frozenset()
    multiples = (1, 1)

    def __init__(self) -> None:
        self.shapes: list[LinearShape] = []

    def create(self, shape: LinearShape, build: Build) -> Bound:
        self.shapes.append(shape)
        return Unquantized().create(shape, build)


def block(made: Build, **more: Any) -> nn.Module:
    whole = nn.Module()
    whole.layers = nn.ModuleDict({"0": nn.Module()})
    whole.layers["0"].attn = attn = nn.Module()
    attn.qkv_proj, attn.o_proj = Linear(made, 8, QKV, **more), Linear(made, 8, 8)
    return whole


def asked(model: nn.Module, stored: Sequence[str] = (), names: WeightMap = NAMES) -> dict[str, tuple[str, ...]]:
    """The path of each linear that a method created -> the modules for which the method was asked."""
    method, modules = Method(), list[tuple[str, ...]]()

    def method_for(found: Sequence[str]) -> Method:
        modules.append(tuple(found))
        return method

    create_linears(model, method_for, names=names, stored=stored)
    return {shape.name: found for shape, found in zip(method.shapes, modules, strict=True)}


def stored(*modules: str, leaf: str = "weight") -> list[str]:
    return [f"model.layers.0.{module}.{leaf}" for module in modules]


ATTN = "model.layers.0.attn"
PARTS = tuple(f"{ATTN}.{part}" for part in QKV)


@pytest.mark.parametrize(
    ("headers", "want"),
    [
        ([], {"qkv_proj": PARTS, "o_proj": (f"{ATTN}.out",)}),
        (
            stored("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", leaf="qweight"),
            {"qkv_proj": PARTS, "o_proj": (f"{ATTN}.o_proj",)},
        ),
        (stored("attn.qkv_proj", "attn.out"), {"qkv_proj": (f"{ATTN}.qkv_proj",), "o_proj": (f"{ATTN}.out",)}),
        (stored("attn.q_proj", "attn.k_proj", "attn.out"), {"o_proj": (f"{ATTN}.out",)}),
    ],
    ids=["likeliest", "other leaves", "stacked in the checkpoint", "one is missing"],
)
def test_the_checkpoints_modules(headers: list[str], want: Mapping[str, tuple[str, ...]]) -> None:
    found = asked(block(build()), headers)
    assert found == {f"layers.0.attn.{name}": modules for name, modules in want.items()}


def test_a_wrapped_block_keeps_its_names() -> None:
    inner = block(build())
    whole = nn.Module()
    whole.layers = nn.ModuleDict({"0": nn.Module()})
    whole.layers["0"].inner = inner.layers["0"]  # type: ignore[index]
    whole.wrapped = {"layers.0": "layers.0.inner"}  # type: ignore[assignment]
    assert asked(whole)["layers.0.attn.qkv_proj"] == PARTS


def test_a_linear_with_a_method_of_its_own_is_not_asked_for() -> None:
    own = Method()
    whole = block(build(), method=own)
    assert list(asked(whole)) == ["layers.0.attn.o_proj"]
    assert [shape.name for shape in own.shapes] == ["layers.0.attn.qkv_proj"]


HEAD = ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("headers", "taken"),
    [([], False), (HEAD[:1], False), (HEAD, False), ([*HEAD, "lm_head.weight_scale"], True)],
    ids=["no headers", "no head", "a plain head", "a quantized head"],
)
def test_a_tied_head_is_quantized_only_if_the_checkpoint_has_it_so(headers: list[str], taken: bool) -> None:
    made, whole = build(), nn.Module()
    whole.embed_tokens = Embedding(made, 10, 8)
    whole.lm_head = LMHead(made, 8, 10, weight=whole.embed_tokens.weight)
    assert asked(whole, headers) == ({"lm_head": ("lm_head",)} if taken else {})
    assert (whole.lm_head.weight is whole.embed_tokens.weight) is not taken
    assert ("lm_head" in made.notes) is taken


def test_an_untied_head_that_the_checkpoint_lacks_stays_plain() -> None:
    made, whole = build(), nn.Module()
    whole.lm_head = LMHead(made, 8, 10)
    assert asked(whole, HEAD[:1]) == {}
    whole.lm_head = LMHead(made, 8, 10)
    assert asked(whole) == {"lm_head": ("lm_head",)}


class Grouped(Method):
    """Of groups of 32 inputs."""

    multiples = (1, 32)


def cut(ranks: int, inputs: int) -> None:
    """Create the linears of an attention whose o_proj has `inputs` inputs, cut over `ranks` ranks."""
    made, whole = build(mesh=Mesh({"attn_tp": ranks})), nn.Module()
    whole.qkv_proj = Linear(made, 8, {"q_proj": 64, "k_proj": 32}, shard=Shard("attn_tp", 0, 8))
    whole.o_proj = Linear(made, inputs, 8, shard=Shard("attn_tp", 1))
    create_linears(whole, lambda modules: Grouped())
    assert whole.o_proj.weight.shape == (8, inputs // ranks)


def test_ranks_that_would_split_a_group_are_an_error_that_names_the_most_that_work() -> None:
    """Three ranks would leave the groups of o_proj whole, but not the heads of q_proj."""
    with pytest.raises(
        ConfigError,
        match=r"192 inputs of o_proj cannot be cut over 4 ranks of attn_tp in multiples of 32, as its quantization "
        r"needs; --tp can be 1, 2$",
    ):
        cut(4, 192)
    cut(2, 192)
    cut(4, 256)
    with pytest.raises(ConfigError, match=r"the 48 inputs of o_proj .* no --tp works"):
        cut(2, 48)


def test_without_tensors_a_linear_says_what_to_call() -> None:
    with pytest.raises(AssertionError, match=r"llmcore\.layers\.create_linears"):
        Linear(build(), 8, 8).finish()


# --- families ----------------------------------------------------------------------------------------------------

ASKED: list[tuple[str, ...]] = []
EXPERTS: list[tuple[str, ...]] = []


class Recording:
    """A QuantMethod that leaves everything plain and remembers what it was asked for."""

    def __init__(self, quantization: Mapping[str, Any], config: object) -> None:
        ASKED.clear()
        EXPERTS.clear()

    def checkpoint(self, checkpoint: Any, device: torch.device) -> Any:
        return checkpoint

    def method_for(self, modules: Sequence[str]) -> None:
        ASKED.append(tuple(modules))

    def expert_method(self, modules: Sequence[str]) -> None:
        EXPERTS.append(tuple(modules))


def recorded(folder: Path) -> list[tuple[str, ...]]:
    registry = registry_for_tests()
    owner = PluginInfo(name="mine", dist="mine", version="1", entry_point="mine")
    registry.take(QuantMethodSpec(name="recording", make=f"{__name__}:Recording", plain=True), owner)
    replace(blueprint_at(folder, registry, DeviceInfo("cpu")), pins=Pins(quant="recording")).dry()
    return list(ASKED)


@pytest.mark.parametrize(
    ("architecture", "first"),
    [
        ("LlamaForCausalLM", [("self_attn", "q_proj", "k_proj", "v_proj"), ("self_attn", "o_proj")]),
        ("Phi3ForCausalLM", [("self_attn", "qkv_proj"), ("self_attn", "o_proj")]),
        ("DeepseekV2ForCausalLM", [("self_attn", "q_a_proj", "kv_a_proj_with_mqa"), ("self_attn", "q_b_proj")]),
    ],
)
def test_a_family_gets_the_names_of_its_checkpoint(
    architecture: str, first: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """Nothing of it is written in the family."""
    more = SMALL_LATENT if "Deepseek" in architecture else {}
    small_model(architecture, tie_word_embeddings=False, **more).save_pretrained(tmp_path)
    found = recorded(tmp_path)
    assert found[:3] == [
        ("lm_head",),
        *(tuple(f"model.layers.0.{head}.{part}" for part in parts) for head, *parts in first),
    ]
    assert not any("kv_b_proj" in module for modules in found for module in modules)
    assert len(found) == len(set(found))
    (tmp_path / "model.safetensors").unlink()
    if architecture != "Phi3ForCausalLM":  # whose checkpoint has stacked what most checkpoints have not
        assert recorded(tmp_path) == found


@pytest.mark.parametrize("weights", [True, False])
def test_the_experts_of_a_mixture_are_asked_for_together(weights: bool, tmp_path: Path) -> None:
    """By the checkpoint's names: gate and up of every expert, then down of every expert."""
    more = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    small_model("Qwen3MoeForCausalLM", **more).save_pretrained(tmp_path)
    if not weights:
        (tmp_path / "model.safetensors").unlink()
    linears, head = recorded(tmp_path), "model.layers.0.mlp.experts"
    assert EXPERTS[0] == (
        *(f"{head}.{expert}.{name}_proj" for expert in range(3) for name in ("gate", "up")),
        *(f"{head}.{expert}.down_proj" for expert in range(3)),
    )
    assert len(EXPERTS) == 3
    assert not any(".experts." in module for modules in linears for module in modules)
