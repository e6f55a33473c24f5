"""Which parameters a checkpoint's tensors fill: ties, shared parameters, and what does not match."""

from __future__ import annotations

import itertools

import pytest
import torch
from held import Cell, Held, model
from llmcore.api.errors import ConfigError
from llmcore.api.models import ModelConfig
from llmcore.api.specs import DeviceInfo
from llmcore.layers import Embedding, Linear, Rows, create_linears
from llmcore.layers.build import Build
from llmcore.weights.load import load_weights
from llmcore.weights.map import Placement, WeightMap
from llmcore_devtools.loaded_model import registry_for_tests
from torch import nn


def test_a_stack_of_the_wrong_size_is_refused() -> None:
    whole = model(q=Cell(3, 2, placement=Placement({"a": (0, 2), "b": (2, 1)})))
    with pytest.raises(ConfigError, match=r"q.weight is \[4, 2\], q.weight needs \[3, 2\]"):
        load_weights(whole, Held(q__weight=torch.rand(4, 2)), WeightMap(fuse={"q": ("a", "b")}))


def test_a_bias_of_zeros_that_the_model_does_not_have_is_left_out() -> None:
    """Others are unexpected, and so is every other tensor of zeros."""
    weight = torch.rand(3, 2)
    whole = model(q=Cell(3, 2))
    load_weights(whole, Held(q__weight=weight, q__bias=torch.zeros(3), k__bias=torch.zeros(1)), WeightMap())
    assert torch.equal(whole.q.weight, weight)
    held = Held(q__weight=weight, q__bias=torch.zeros(3), k__bias=torch.ones(1), k__scale=torch.zeros(1))
    with pytest.raises(ConfigError, match=r"unexpected: k\.bias, k\.scale\. Check"):
        load_weights(whole, held, WeightMap())


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
    create_linears(whole)
    table, bias = torch.rand(5, 4), torch.rand(5)
    weighed = load_weights(whole, Held(table__weight=table, head__bias=bias), rules)
    x = torch.rand(3, 4)
    torch.testing.assert_close(whole.head(x, Rows(0)), x @ table.T + bias)
    assert whole.head.weight is whole.table.weight
    assert (weighed.parameters, weighed.bytes, weighed.tensors) == (20 + 5, (20 + 5) * 4, 2)


def test_a_tie_leaves_a_linear_alone_that_is_quantized() -> None:
    """It has no parameter `weight`, and the checkpoint fills what it has."""
    whole, codes = nn.Module(), nn.Module()
    whole.table, whole.head = Cell(4, 2), codes
    codes.codes = nn.Parameter(torch.zeros(4, 2, dtype=torch.int8), requires_grad=False)
    held = torch.arange(8, dtype=torch.int8).view(4, 2)
    rules = WeightMap(tie={"head.weight": "table.weight"})
    load_weights(whole, Held(table__weight=torch.rand(4, 2), head__codes=held), rules)
    assert torch.equal(codes.codes, held) and not hasattr(codes, "weight")


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
        weighed = load_weights(whole, held, WeightMap())
        assert (weighed.bytes, weighed.tensors) == ((32, 1) if head is one else (64, 2))
        assert torch.equal(whole.table.weight, table) and torch.equal(whole.head.weight, head)
        assert (whole.head.weight is whole.table.weight) == (head is one)


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
    assert load_weights(whole, Held(a__q__weight=q, b__k__weight=k), names).bytes == 24
    assert torch.equal(whole.b.qkv.weight, torch.cat((q, k)))
    with pytest.raises(ConfigError, match=r"share one parameter.*build modules that do not share"):
        load_weights(whole, Held(a__q__weight=q, b__q__weight=-q, a__k__weight=k), names)


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
