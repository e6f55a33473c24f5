"""`--model-format`: an assertion about the checkpoint, and with fp8 a way to quantize a plain one."""

from __future__ import annotations

from pathlib import Path

import packers
import pytest
import torch
from llmcore.api import ConfigError
from llmcore.api.specs import OptionSpec
from llmcore.config import make_config
from llmcore.engine.llm import LLM
from llmcore.engine.model import Loaded, load_model, pick_device
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import registry_for_tests
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_quantization.model_format import PLAIN, READ
from packers import CASES
from safetensors.torch import load_file

REGISTRY = registry_for_tests()
OPTIONS = [spec for spec, _ in REGISTRY.specs(OptionSpec)]
SAMPLES = {"awq": "awq", "gptq": "gptq", "compressed-tensors": "ct, 4 bits", "fp8": "fp8", "mxfp4": ""}
"""Format -> a case of it. There is not yet a family for mxfp4."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain checkpoint, and the same in every format."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    small_model("LlamaForCausalLM", num_hidden_layers=1, head_dim=32, **sizes).save_pretrained(root / PLAIN)
    weights, config = load_file(root / PLAIN / "model.safetensors"), packers.read_config(root / PLAIN)
    for name, case in SAMPLES.items():
        if case:
            stored, _ = packers.packed_model(weights, CASES[case])
            packers.write(root / name, {**config, "quantization_config": CASES[case].config}, stored)
    return {name: root / name for name, case in {PLAIN: PLAIN, **SAMPLES}.items() if case}


def loaded(folder: Path, **settings: object) -> Loaded:
    config = make_config(OPTIONS, model_dir=str(folder), device="cpu", **settings)
    return load_model(config, REGISTRY, pick_device(REGISTRY, "cpu"), lambda stage, done, total: None)


@pytest.mark.parametrize("said", [PLAIN, *READ])
@pytest.mark.parametrize("name", [PLAIN, *(name for name, case in SAMPLES.items() if case)])
def test_every_format_on_every_checkpoint(folders: dict[str, Path], name: str, said: str) -> None:
    """A true assertion changes nothing. The error of a false one says what the checkpoint is."""
    if said == name:
        with_it, without = loaded(folders[name], model_format=said), loaded(folders[name])
        assert with_it.quant == said and without.quant == (None if said == PLAIN else said)
        held = dict(without.model.named_parameters())
        assert {n: (t.shape, t.dtype) for n, t in with_it.model.named_parameters()} == {
            n: (t.shape, t.dtype) for n, t in held.items()
        }
        return
    if (said, name) == ("fp8", PLAIN):
        codes = loaded(folders[name], model_format=said).model.layers["0"].mlp.down_proj
        assert codes.codes.dtype == torch.float8_e4m3fn and codes.scale.shape == (128, 2)
        return
    told = "the weights are plain" if name == PLAIN else f"the weights are quantized with '{name}'"
    fix = "leave out the mode, or use another checkpoint"
    with pytest.raises(ConfigError, match=rf"--model_format {said} does not fit .*: {told}.*method {said} .*{fix}"):
        loaded(folders[name], model_format=said)


def test_plain_weights_are_those_of_the_mode(folders: dict[str, Path]) -> None:
    asked = loaded(folders[PLAIN], model_format="fp8").model.state_dict()
    mode = loaded(folders[PLAIN], mode=("fp8w8a8_b128",)).model.state_dict()
    assert asked.keys() == mode.keys()
    for name, tensor in mode.items():
        assert torch.equal(asked[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_format": "llama"}, "model_format"),
        ({"model_format": "fp8", "mode": ("g64",)}, "no group to choose"),
        ({"model_format": "awq", "mode": ("triton_w8a16",)}, "needs a checkpoint that is quantized for it"),
        (
            {"model_format": "fp8", "mode": ("triton_w8a16",)},
            "pins quant to 'online_w8a16', --mode model_format_fp8 to",
        ),
    ],
)
def test_what_does_not_go_together(folders: dict[str, Path], settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(folders[PLAIN], **settings)


def test_the_library_takes_it(folders: dict[str, Path]) -> None:
    write_tokenizer(folders["awq"])
    with pytest.raises(ConfigError, match="--model_format gptq does not fit"):
        LLM(folders["awq"], device="cpu", model_format="gptq")
