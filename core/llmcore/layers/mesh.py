"""The groups of ranks for which a model is built. A layer names the group that it is cut over, never a world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmcore.api.errors import ConfigError
from llmcore.ops.comm import Peers
from llmcore.weights.map import Shard

GROUPS = ("attn_tp", "moe_tp", "ep", "pp", "dp")
"""The groups divide, in this order: attention heads, inner sizes of MLPs and experts, whole experts, layers, and
replicas of attention."""

MOST_RANKS = 64
"""Errors list the numbers of ranks that work up to this one."""


@dataclass(frozen=True)
class Mesh:
    """The number of ranks in each group, and this process's rank in it. Groups that are not named have one rank.

    `peers`: group -> the ranks of the group, as this process reaches them. A model of several ranks is built and
    filled without them, and cannot run.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    peers: Mapping[str, Peers] = field(default_factory=dict, compare=False, repr=False)

    def size(self, group: str) -> int:
        """The number of ranks in `group`. Raises ConfigError for an unknown group."""
        if group not in GROUPS:
            raise ConfigError(f"there is no mesh group {group!r}; groups: {', '.join(GROUPS)}")
        return self.sizes.get(group, 1)

    def rank(self, group: str) -> int:
        """This process's index in `group`."""
        return self.ranks.get(group, 0)

    def set_limit(self, seconds: float) -> None:
        """From now on this rank waits for another one for `seconds` at most, in each call."""
        for peers in set(self.peers.values()):
            peers.set_limit(seconds)

    def share(self, total: int, shard: Shard | None, what: str) -> int:
        """One rank's share of `total`. Raises ConfigError, with the numbers of ranks that work, if there is none.

        `what`: the name of the size in the error.
        """
        if shard is None:
            return total
        ranks = self.size(shard.group)
        if (share := shard.share(total, ranks)) is None:
            of = f" in multiples of {shard.multiple}" if shard.multiple > 1 else ""
            works = [number for number in range(1, MOST_RANKS + 1) if shard.share(total, number) is not None]
            raise ConfigError(
                f"{what} of {total} cannot be cut over {ranks} ranks of {shard.group}{of}; {choices(works)}"
            )
        return share

    def heads(self, heads: int, kv_heads: int, group: str = "attn_tp") -> tuple[int, int]:
        """One rank's attention heads and KV heads. Raises ConfigError, with the numbers of ranks that work.

        Ranks hold different heads. If there are fewer KV heads than ranks, neighbours hold the same one.
        """
        cuts = ((heads, Shard(group, 0)), (kv_heads, Shard(group, 0, repeat=True)))

        def shares(ranks: int) -> list[int]:
            found = (shard.share(total, ranks) for total, shard in cuts)
            return [share for share in found if share is not None]

        if len(held := shares(self.size(group))) < len(cuts):
            works = [number for number in range(1, min(heads, MOST_RANKS) + 1) if len(shares(number)) == len(cuts)]
            raise ConfigError(
                f"{heads} attention heads and {kv_heads} KV heads cannot be cut over {self.size(group)} ranks of "
                f"{group}; {choices(works)}"
            )
        return held[0], held[1]


def choices(ranks: list[int]) -> str:
    """Words about the numbers of ranks that work."""
    return f"--tp can be {', '.join(map(str, ranks))}" if ranks else "no --tp works"


def tensor_parallel(rank: int, ranks: int, peers: Peers | None = None) -> Mesh:
    """The mesh of `rank` of `ranks` processes that share every layer of one model."""
    groups = ("attn_tp", "moe_tp")
    held = {} if peers is None else dict.fromkeys(groups, peers)
    return Mesh(dict.fromkeys(groups, ranks), dict.fromkeys(groups, rank), held)
