"""The streaming loader: parts, shards, ties, what does not match, and how much memory it takes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api.errors import ConfigError
from llmcore.api.models import ModelConfig
from llmcore.api.specs import DeviceInfo
from llmcore.layers import Embedding, Linear, Rows
from llmcore.layers.build import Build
from llmcore.layers.mesh import Mesh
from llmcore.weights.load import dummy_weights, filled_shapes, load_weights
from llmcore.weights.map import Placement, Shard, WeightMap
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from safetensors.torch import save_file
from torch import nn


class Held:
    """A checkpoint in memory."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def config(self) -> dict[str, Any]:
        return {}

    def generation_config(self) -> dict[str, Any]:
        return {}

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {name: (tuple(tensor.shape), "F32") for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, tensor in self._tensors.items():
            yield name, lambda tensor=tensor: tensor


class Cell(nn.Module):
    """One parameter with its placement."""

    def __init__(self, *shape: int, placement: Placement | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
        self.placements = {} if placement is None else {"weight": placement}


def model(**cells: Cell) -> nn.Module:
    whole = nn.Module()
    for name, cell in cells.items():
        whole.add_module(name, cell)
    return whole


def test_parts_are_stacked() -> None:
    whole = model(qkv=Cell(5, 2, placement=Placement({"q": (0, 3), "k": (3, 2)})))
    q, k = torch.rand(3, 2), torch.rand(2, 2)
    seen: list[int] = []
    total = load_weights(
        whole, Held(k__weight=k, q__weight=q), WeightMap(fuse={"qkv": ("q", "k")}), progress=seen.append
    )
    assert torch.equal(whole.qkv.weight, torch.cat((q, k)))
    assert (total, sorted(seen)) == (40, [16, 24])


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


def test_a_stack_of_the_wrong_size_is_refused() -> None:
    whole = model(q=Cell(3, 2, placement=Placement({"a": (0, 2), "b": (2, 1)})))
    with pytest.raises(ConfigError, match=r"q.weight is \[4, 2\], q.weight needs \[3, 2\]"):
        load_weights(whole, Held(q__weight=torch.rand(4, 2)), WeightMap(fuse={"q": ("a", "b")}))


def test_a_tie_shares_memory_only_where_the_checkpoint_lacks_it() -> None:
    rules = WeightMap(tie={"head.weight": "table.weight"})
    tied, untied = model(table=Cell(4, 2), head=Cell(4, 2)), model(table=Cell(4, 2), head=Cell(4, 2))
    table, head = torch.rand(4, 2), torch.rand(4, 2)
    load_weights(tied, Held(table__weight=table), rules)
    load_weights(untied, Held(table__weight=table, head__weight=head), rules)
    assert tied.head.weight is tied.table.weight
    assert torch.equal(untied.head.weight, head)


def build() -> Build:
    config = ModelConfig(
        architecture="X", vocab_size=5, hidden_size=4, num_layers=0, max_position=8, dtype="f32", kv_groups=()
    )
    return Build(
        registry=registry_for_tests(), config=config, device=DeviceInfo("cpu"), torch_device=torch.device("cpu")
    )


def test_a_tie_reaches_a_linear_that_has_bound_its_weight_already() -> None:
    made = build()
    rules = WeightMap(tie={"head.weight": "table.weight"})
    whole = nn.Module()
    whole.table, whole.head = Embedding(made, 5, 4), Linear(made, 4, 5, bias=True)
    table, bias = torch.rand(5, 4), torch.rand(5)
    total = load_weights(whole, Held(table__weight=table, head__bias=bias), rules)
    x = torch.rand(3, 4)
    torch.testing.assert_close(whole.head(x, Rows(0)), x @ table.T + bias)
    assert whole.head.weight is whole.table.weight and total == (20 + 5) * 4
    shapes = filled_shapes(whole, Held(table__weight=table, head__bias=bias).sizes(), rules)
    assert shapes == {"table.weight": (5, 4), "head.bias": (5,)}


@pytest.mark.parametrize("rule", [{"haed.weight": "table.weight"}, {"head.weight": "tabel.weight"}])
def test_a_tie_of_what_the_model_does_not_have(rule: dict[str, str]) -> None:
    whole = model(table=Cell(4, 2), head=Cell(4, 2))
    held = Held(table__weight=torch.rand(4, 2), head__weight=torch.rand(4, 2))
    with pytest.raises(ConfigError, match=r"tie names '(haed|tabel).weight', which the model does not have"):
        load_weights(whole, held, WeightMap(tie=rule))


def test_modules_that_share_and_a_checkpoint_with_both() -> None:
    """Equal tensors stay one; of different ones each has its own, in whichever order they come."""
    one, other = torch.rand(4, 2), torch.rand(4, 2)
    for order, (table, head) in itertools.product(("th", "ht"), ((one, one), (one, other))):
        whole = model(table=Cell(4, 2), head=Cell(4, 2))
        whole.head.weight = whole.table.weight
        both = {"table__weight": table, "head__weight": head}
        held = Held(**(both if order == "th" else dict(reversed(both.items()))))
        assert load_weights(whole, held, WeightMap()) == (32 if head is one else 64)
        assert torch.equal(whole.table.weight, table) and torch.equal(whole.head.weight, head)
        assert (whole.head.weight is whole.table.weight) == (head is one)
        assert len(filled_shapes(whole, held.sizes(), WeightMap())) == (1 if head is one else 2)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_tensors_are_compared_in_parts_of_any_size(rows: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcore.weights.fit.COMPARED", rows * size)
    table = torch.rand(7, size).bfloat16()
    other = table.clone()
    other[6, size - 1] = 2
    for head in (table.clone(), other):
        whole = model(table=Cell(7, size), head=Cell(7, size))
        whole.table.weight = whole.head.weight = nn.Parameter(torch.zeros_like(table), requires_grad=False)
        load_weights(whole, Held(table__weight=table, head__weight=head.float()), WeightMap())
        assert (whole.table.weight is whole.head.weight) == (head is not other)
        assert torch.equal(whole.head.weight, head)


def test_a_stack_that_two_blocks_share() -> None:
    whole = model(a=model(qkv=Cell(3, 2, placement=Placement({"q": (0, 2), "k": (2, 1)}))))  # type: ignore[arg-type]
    whole.b = whole.a
    q, k = torch.rand(2, 2), torch.rand(1, 2)
    names = WeightMap(fuse={"qkv": ("q", "k")})
    assert load_weights(whole, Held(a__q__weight=q, b__k__weight=k), names) == 24
    assert torch.equal(whole.b.qkv.weight, torch.cat((q, k)))
    with pytest.raises(ConfigError, match=r"share one parameter.*build modules that do not share"):
        load_weights(whole, Held(a__q__weight=q, b__q__weight=-q, a__k__weight=k), names)


def test_matrices_are_transposed_before_they_are_cut() -> None:
    rows, columns = Placement({"q": (0, 2), "k": (2, 1)}, Shard("attn_tp", 0)), Placement({}, Shard("attn_tp", 1))
    whole = model(qkv=Cell(3, 2, placement=rows), o=Cell(2, 3, placement=columns))
    qkv, o = torch.rand(2, 6), torch.rand(6, 2)
    names = WeightMap(suffix={"c_attn": "qkv", "c_proj": "o"}, transpose=("c_*",))
    mesh = Mesh({"attn_tp": 2}, {"attn_tp": 1})
    load_weights(whole, Held(c_attn__weight=qkv, c_proj__weight=o), names, mesh=mesh)
    assert torch.equal(whole.qkv.weight, torch.cat((qkv.T[2:4], qkv.T[5:])))
    assert torch.equal(whole.o.weight, o.T[:, 3:])


def test_a_rule_that_is_misspelt_is_named() -> None:
    """A square matrix that is not transposed would be taken as it is."""
    names = WeightMap(transpose=("*c_porj.weight",))
    with pytest.raises(ConfigError, match=r"rules of the WeightMap that no name meets: transpose '\*c_porj.weight'"):
        load_weights(model(c_proj=Cell(2, 2)), Held(c_proj__weight=torch.rand(2, 2)), names)


def test_a_start_that_is_misspelt_is_named_beside_what_is_missing() -> None:
    names, held = WeightMap(rename={"transfomer.": "", "gpt.": ""}), Held(transformer__a__weight=torch.rand(2, 2))
    with pytest.raises(ConfigError, match=r"no name meets: rename 'transfomer\.', rename 'gpt\.'"):
        load_weights(model(a=Cell(2, 2)), held, names)
    load_weights(model(a=Cell(2, 2)), Held(a__weight=torch.rand(2, 2)), names)


def test_one_error_lists_all_that_does_not_match() -> None:
    whole = model(a=Cell(2, 2), b=Cell(2, 2), qkv=Cell(2, 2, placement=Placement({"q": (0, 1), "k": (1, 1)})))
    held = Held(a__weight=torch.rand(3, 2), q__weight=torch.rand(1, 2), extra__weight=torch.rand(1))
    with pytest.raises(ConfigError) as error:
        load_weights(whole, held, WeightMap(fuse={"qkv": ("q", "k")}))
    text = str(error.value)
    assert "missing: b.weight, k.weight;" in text
    assert "unexpected: extra.weight" in text
    assert "a.weight is [3, 2], a.weight needs [2, 2]" in text


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
    assert dummy_weights(whole) == (64 + 3) * 4
    assert all(bool(parameter.isfinite().all()) for parameter in whole.parameters())
