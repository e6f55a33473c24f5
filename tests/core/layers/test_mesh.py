"""Groups of ranks: sizes, ranks and shares."""

from __future__ import annotations

import pytest
from llmcore.api.errors import ConfigError
from llmcore.layers import Mesh
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
    for total in (63, 32):
        with pytest.raises(ConfigError, match=f"heads of {total} cannot be cut over 4 ranks of attn_tp in multiples"):
            mesh.share(total, Shard("attn_tp", 0, 16), "heads")
