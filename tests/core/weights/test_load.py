"""The streaming loader: parts, shards, dummy weights, and how much memory it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from held import Cell, Held, model
from llmcore.layers.mesh import Mesh
from llmcore.weights.load import dummy_weights, load_weights
from llmcore.weights.map import Placement, Shard, WeightMap
from llmcore.weights.source import outputs_first
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from safetensors.torch import save_file


def test_parts_are_stacked() -> None:
    whole = model(qkv=Cell(5, 2, placement=Placement({"q": (0, 3), "k": (3, 2)})))
    q, k = torch.rand(3, 2), torch.rand(2, 2)
    seen: list[int] = []
    weighed = load_weights(
        whole, Held(k__weight=k, q__weight=q), WeightMap(fuse={"qkv": ("q", "k")}), progress=seen.append
    )
    assert torch.equal(whole.qkv.weight, torch.cat((q, k)))
    assert (weighed.bytes, sorted(seen)) == (40, [16, 24])


def test_one_tensor_is_split() -> None:
    whole = model(gate=Cell(3, 2), up=Cell(1, 2))
    both = torch.rand(4, 2)
    load_weights(whole, Held(gate_up__weight=both), WeightMap(split={"gate_up": ("gate", "up")}))
    assert torch.equal(torch.cat((whole.gate.weight, whole.up.weight)), both)


def test_a_rank_takes_its_share_of_every_part() -> None:
    shards = {"q": Placement({"a": (0, 2), "b": (2, 1)}, Shard("attn_tp", 0)), "o": Placement({}, Shard("attn_tp", 1))}
    whole = model(q=Cell(3, 2, placement=shards["q"]), o=Cell(2, 3, placement=shards["o"]))
    a, b, o = torch.rand(4, 2), torch.rand(2, 2), torch.rand(2, 6)
    mesh = Mesh({"attn_tp": 2}, {"attn_tp": 1})
    load_weights(whole, Held(a__weight=a, b__weight=b, o__weight=o), WeightMap(fuse={"q": ("a", "b")}), mesh=mesh)
    assert torch.equal(whole.q.weight, torch.cat((a[2:], b[1:])))
    assert torch.equal(whole.o.weight, o[:, 3:])


@pytest.mark.parametrize("rank", range(4))
def test_neighbours_take_the_same_part_and_padding_is_zeros(rank: int) -> None:
    """Four ranks: of two heads of two rows each is held twice; of nine rows the last rank has none."""
    repeated = Placement({"k": (0, 2)}, Shard("attn_tp", 0, 2, repeat=True), totals={"k": 4})
    padded = Placement(shard=Shard("attn_tp", 0, 3, pad=True), totals={"": 9})
    table = Placement(totals={"": 9})
    whole = model(q=Cell(2, 2, placement=repeated), o=Cell(3, 2, placement=padded), t=Cell(12, 2, placement=table))
    k, o, t = torch.rand(4, 2), torch.rand(9, 2), torch.rand(9, 2)
    mesh = Mesh({"attn_tp": 4}, {"attn_tp": rank})
    load_weights(whole, Held(k__weight=k, o__weight=o, t__weight=t), WeightMap(fuse={"q": ("k",)}), mesh=mesh)
    assert torch.equal(whole.q.weight, k[:2] if rank < 2 else k[2:])
    filled = torch.cat((o, torch.zeros(3, 2)))
    assert torch.equal(whole.o.weight, filled[3 * rank : 3 * rank + 3])
    assert torch.equal(whole.t.weight, torch.cat((t, torch.zeros(3, 2))))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_may_hold_the_stack(rank: int) -> None:
    """Every part of it is cut over the ranks by itself, along either dimension."""
    parts = {"a": (0, 2), "b": (2, 1)}
    rows, columns = Placement(parts, Shard("attn_tp", 0)), Placement(parts, Shard("attn_tp", 1))
    whole = model(q=Cell(3, 2, placement=rows), o=Cell(3, 2, placement=columns))
    q, o = torch.rand(6, 2), torch.rand(3, 4)
    mesh = Mesh({"attn_tp": 2}, {"attn_tp": rank})
    load_weights(whole, Held(q__weight=q, o__weight=o), WeightMap(fuse={"q": ("a", "b")}), mesh=mesh)
    assert torch.equal(whole.q.weight, torch.cat((q[:4][2 * rank : 2 * rank + 2], q[4:][rank : rank + 1])))
    assert torch.equal(whole.o.weight, o[:, 2 * rank : 2 * rank + 2])


def test_matrices_are_transposed_before_they_are_cut() -> None:
    rows, columns = Placement({"q": (0, 2), "k": (2, 1)}, Shard("attn_tp", 0)), Placement({}, Shard("attn_tp", 1))
    whole = model(qkv=Cell(3, 2, placement=rows), o=Cell(2, 3, placement=columns))
    qkv, o = torch.rand(2, 6), torch.rand(6, 2)
    names = WeightMap(suffix={"c_attn": "qkv", "c_proj": "o"}, transpose=("c_*",))
    mesh = Mesh({"attn_tp": 2}, {"attn_tp": 1})
    load_weights(whole, outputs_first(Held(c_attn__weight=qkv, c_proj__weight=o), names), names, mesh=mesh)
    assert torch.equal(whole.qkv.weight, torch.cat((qkv.T[2:4], qkv.T[5:])))
    assert torch.equal(whole.o.weight, o.T[:, 3:])


def test_dummy_weights(tmp_path: Path) -> None:
    small_model("LlamaForCausalLM", tie_word_embeddings=False).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    first, second = (LoadedModel(tmp_path, data_type="fp32", dummy=True) for _ in range(2))
    assert torch.equal(first.model.embed_tokens.weight, second.model.embed_tokens.weight)
    assert abs(float(first.model.embed_tokens.weight.std()) - 0.02) < 0.001
    assert torch.equal(first.model.norm.weight, torch.ones(72))
    assert first.generate([1, 2, 3], 4).tokens == second.generate([1, 2, 3], 4).tokens


MEASURE = """
import sys, threading, time
from pathlib import Path
from llmcore.api.models import ModelConfig
from llmcore.api.specs import DeviceInfo
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
import torch, llmcore.layers, llmcore.weights.load, llmcore_llama.llama

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024

registry = registry_for_tests()
torch.ones(64, 64) @ torch.ones(64, 64)
torch.ops.mkldnn._linear_pointwise(torch.ones(2, 64), torch.ones(64, 64), None, "none", [], "")
before, peak, stop = anonymous(), [0], []
def watch():
    while not stop:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch, daemon=True)
thread.start()
model = LoadedModel(Path(sys.argv[1]), data_type=sys.argv[2], registry=registry, tokens=64, requests=1)
stop.append(1)
thread.join()
print(peak[0] - before, model.weight_bytes)
"""


@pytest.mark.parametrize(("tied", "dtype"), [(True, "fp32"), (False, "bf16")])
def test_memory(tmp_path: Path, tied: bool, dtype: str) -> None:
    big = small_model(
        "LlamaForCausalLM",
        vocab_size=16384,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=12,
        head_dim=64,
        tie_word_embeddings=tied,
    )
    big.save_pretrained(tmp_path, max_shard_size="40MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    reply = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    used, weights = map(int, reply.stdout.split())
    assert weights > 150e6 if dtype == "fp32" else weights > 75e6
    assert used <= 1.2 * weights, f"{used / weights:.2f} times the weights"


def test_sharded_safetensors_and_old_names(tmp_path: Path) -> None:
    theirs = small_model("LlamaForCausalLM")
    theirs.save_pretrained(tmp_path)
    state = {**theirs.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    (tmp_path / "model.safetensors").unlink()
    names = sorted(state)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: state[name].contiguous() for name in part}, tmp_path / f"part{number}.safetensors")
        index.update(dict.fromkeys(part, f"part{number}.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    ours = LoadedModel(tmp_path, registry=registry_for_tests())
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        expected = theirs(ids).logits[0, -1]
    torch.testing.assert_close(ours.generate(ids[0].tolist(), 1).logits[0], expected, rtol=1e-4, atol=1e-4)


def test_dummy_fills_every_parameter() -> None:
    whole = model(a=Cell(8, 8), b=Cell(3))
    assert dummy_weights(whole).bytes == (64 + 3) * 4
    assert all(bool(parameter.isfinite().all()) for parameter in whole.parameters())
