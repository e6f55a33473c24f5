"""The groups of ranks a model is built against. Layers name the group they shard over, never a world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmcore.errors import ConfigError
from llmcore.weights.map import Shard

GROUPS = ("attn_tp", "moe_tp", "ep", "pp", "dp")
"""Attention heads, dense and expert inner sizes, whole experts, layers, replicas of attention."""


@dataclass(frozen=True)
class Mesh:
    """Ranks per group, and this process's place in it; groups not named have one rank."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)

    def size(self, group: str) -> int:
        """Ranks of `group`; ConfigError for a group there is none of."""
        if group not in GROUPS:
            raise ConfigError(f"there is no mesh group {group!r}; groups: {', '.join(GROUPS)}")
        return self.sizes.get(group, 1)

    def rank(self, group: str) -> int:
        """This process's index in `group`."""
        return self.ranks.get(group, 0)

    def share(self, total: int, shard: Shard | None, what: str) -> int:
        """What one rank gets of `total`; ConfigError where it cannot be cut in the shard's multiples."""
        if shard is None:
            return total
        size = self.size(shard.group)
        if total % (size * shard.multiple):
            raise ConfigError(
                f"{what} of {total} cannot be cut over {size} ranks of {shard.group} in multiples of "
                f"{shard.multiple}; use fewer ranks"
            )
        return total // size
