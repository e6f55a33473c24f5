"""A config that ties the head to the embedding, and files that hold a head all the same: transformers is the oracle.

Different tensors are both used, and equal ones are one parameter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel
from safetensors.torch import load_file, save_file

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
FAMILIES = (
    *("Cohere", "Cohere2", "DeepseekV2", "DeepseekV3", "Gemma2", "Gemma3", "Glm", "Glm4", "Granite", "Llama"),
    *("Mistral", "Mixtral", "Olmo2", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3", "StableLm"),
    "Starcoder2",
)
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}


def save(folder: Path, tensors: Mapping[str, torch.Tensor], files: Iterable[Iterable[str]]) -> None:
    """The tensors in one file, or in shards of these names in this order."""
    (folder / "model.safetensors").unlink()
    index = {}
    for number, names in enumerate(files):
        save_file({name: tensors[name].contiguous() for name in names}, folder / f"part{number}.safetensors")
        index |= dict.fromkeys(names, f"part{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def written(folder: Path, architecture: str = "LlamaForCausalLM", **fields: Any) -> dict[str, torch.Tensor]:
    """A tied checkpoint in `folder`; returns its tensors."""
    more = SPARSE if "Moe" in architecture or "Mixtral" in architecture else {}
    small_model(architecture, tie_word_embeddings=True, num_hidden_layers=2, **more, **fields).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@torch.inference_mode()
def check(folder: Path) -> LoadedModel:
    """Our logits are those of transformers, as it reads the same folder."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    theirs = getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    ours = LoadedModel(folder, data_type="f32")
    expected = theirs.eval()(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(ours.all_logits(TOKENS), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    return ours


def shares(ours: LoadedModel) -> bool:
    # a linear that holds its own may have packed it
    return getattr(ours.model.lm_head, "weight", None) is ours.model.embed_tokens.weight


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_differs_is_used(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = written(tmp_path, f"{family}ForCausalLM")
    assert HEAD not in tensors
    save_file({**tensors, HEAD: tensors[EMBEDDING].flip(0)}, tmp_path / "model.safetensors")
    check(tmp_path)
    assert sum("differ in the checkpoint" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("first", [EMBEDDING, HEAD])
@pytest.mark.parametrize("equal", [True, False])
def test_shards_in_either_order(first: str, equal: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = written(tmp_path)
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 0 if equal else 1
    names = [name for name in tensors if name != EMBEDDING]
    second = HEAD if first == EMBEDDING else EMBEDDING
    save(tmp_path, {**tensors, HEAD: head}, ([first], names, [second]))
    with caplog.at_level(logging.INFO, "llmcore"):
        ours = check(tmp_path)
    assert shares(ours) == equal
    table = tensors[EMBEDDING].nbytes
    assert ours.weight_bytes == sum(tensor.nbytes for tensor in tensors.values()) + (0 if equal else table)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("llmcore")] == (
        []
        if equal
        else [
            f"{first} and {second} differ in the checkpoint, although the model's config ties them "
            "(tie_word_embeddings); each is used as the checkpoint has it."
        ]
    )


def test_a_file_with_the_head_alone(tmp_path: Path) -> None:
    """transformers takes it for the embedding, too."""
    tensors = written(tmp_path)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    save_file(tensors, tmp_path / "model.safetensors")
    assert shares(check(tmp_path))


@pytest.mark.parametrize(("family", "tied"), [("Llama", False), ("Gemma2", True), ("Cohere", True)])
def test_a_config_that_says_nothing(family: str, tied: bool, tmp_path: Path) -> None:
    tensors = written(tmp_path, f"{family}ForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    assert shares(check(tmp_path)) == tied
    save_file({**tensors, HEAD: tensors[EMBEDDING].flip(0)}, tmp_path / "model.safetensors")
    assert not shares(check(tmp_path))


def test_tensors_that_differ_less_than_the_type_they_are_held_in(tmp_path: Path) -> None:
    """What is compared is what would be computed with."""
    tensors = written(tmp_path)
    near = tensors[EMBEDDING].bfloat16().float() * (1 + 2**-12)
    save_file({**tensors, EMBEDDING: near.bfloat16().float(), HEAD: near}, tmp_path / "model.safetensors")
    assert shares(LoadedModel(tmp_path, data_type="bf16"))
    assert not shares(LoadedModel(tmp_path, data_type="f32"))
