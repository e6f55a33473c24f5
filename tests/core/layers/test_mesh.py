"""Groups of ranks: sizes, ranks and shares."""

from __future__ import annotations

import pytest
from llmcore.api.errors import ConfigError
from llmcore.layers import Mesh, tensor_parallel
from llmcore.weights.map import Shard


def test_a_group_that_is_not_named_has_one_rank() -> None:
    mesh = Mesh({"attn_tp": 4}, {"attn_tp": 3})
    assert (mesh.size("attn_tp"), mesh.rank("attn_tp")) == (4, 3)
    assert (mesh.size("ep"), mesh.rank("ep")) == (1, 0)
    with pytest.raises(ConfigError, match="no mesh group 'heads'; groups: attn_tp"):
        mesh.size("heads")


def test_a_rank_gets_its_share_in_whole_multiples() -> None:
    mesh = Mesh({"attn_tp": 4})
    assert mesh.share(64, Shard("attn_tp", 0, 16), "heads") == 16
    assert mesh.share(63, None, "heads") == 63
    assert mesh.share(63, Shard("ep", 0), "experts") == 63
    with pytest.raises(ConfigError, match=r"ranks of attn_tp; --tp can be 1, 3, 7, 9, 21, 63$"):
        mesh.share(63, Shard("attn_tp", 0), "heads")
    with pytest.raises(ConfigError, match=r"in multiples of 16; no --tp works$"):
        mesh.share(63, Shard("attn_tp", 0, 16), "heads")
    for total in (63, 32):
        with pytest.raises(ConfigError, match=f"heads of {total} cannot be cut over 4 ranks of attn_tp in multiples"):
            mesh.share(total, Shard("attn_tp", 0, 16), "heads")


def test_ranks_of_one_model_share_heads_and_inner_sizes() -> None:
    mesh = tensor_parallel(1, 2)
    assert [(mesh.size(group), mesh.rank(group)) for group in ("attn_tp", "moe_tp", "ep")] == [(2, 1), (2, 1), (1, 0)]


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "held"),
    [(1, 9, 3, (9, 3)), (3, 9, 3, (3, 1)), (2, 8, 4, (4, 2)), (4, 8, 2, (2, 1)), (8, 8, 1, (1, 1))],
)
def test_neighbours_repeat_kv_heads(ranks: int, heads: int, kv_heads: int, held: tuple[int, int]) -> None:
    assert tensor_parallel(0, ranks).heads(heads, kv_heads) == held


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "works"),
    [(2, 9, 3, "1, 3, 9"), (4, 6, 2, "1, 2, 6"), (3, 4, 4, "1, 2, 4"), (16, 8, 8, "1, 2, 4, 8")],
)
def test_heads_that_cannot_be_cut_list_the_ranks_that_can(ranks: int, heads: int, kv_heads: int, works: str) -> None:
    with pytest.raises(ConfigError, match=f"{heads} attention heads and {kv_heads} KV heads .*; --tp can be {works}$"):
        tensor_parallel(0, ranks).heads(heads, kv_heads)
