"""The groups of ranks for which a model is built. A layer names the group that it is cut over, never a world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmcore.api.errors import ConfigError
from llmcore.weights.map import Shard

GROUPS = ("attn_tp", "moe_tp", "ep", "pp", "dp")
"""The groups divide, in this order: attention heads, inner sizes of MLPs and experts, whole experts, layers, and
replicas of attention."""


@dataclass(frozen=True)
class Mesh:
    """The number of ranks in each group, and this process's rank in it. Groups that are not named have one rank."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)

    def size(self, group: str) -> int:
        """The number of ranks in `group`. Raises ConfigError for an unknown group."""
        if group not in GROUPS:
            raise ConfigError(f"there is no mesh group {group!r}; groups: {', '.join(GROUPS)}")
        return self.sizes.get(group, 1)

    def rank(self, group: str) -> int:
        """This process's index in `group`."""
        return self.ranks.get(group, 0)

    def share(self, total: int, shard: Shard | None, what: str) -> int:
        """One rank's share of `total`. Raises ConfigError if the shard's multiples cannot be divided evenly.

        `what`: the name of the size in the error.
        """
        if shard is None:
            return total
        size = self.size(shard.group)
        if total % (size * shard.multiple):
            raise ConfigError(
                f"{what} of {total} cannot be cut over {size} ranks of {shard.group} in multiples of "
                f"{shard.multiple}; use fewer ranks"
            )
        return total // size
