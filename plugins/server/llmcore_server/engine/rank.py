"""`python -m llmcore_server.engine.rank FD`: any rank of an engine but the first, as a process of a server."""

from __future__ import annotations

import zmq
from llmcore.api.engine import Follower, join
from llmcore.registry.loader import build_registry

from llmcore_server import child
from llmcore_server.engine.beats import Beats, device_name
from llmcore_server.engine.link import RankUplink
from llmcore_server.messages import RankLaunch


def run(launch: RankLaunch, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Follow rank 0 until it ends. Raises RankLost where this rank fails."""
    registry = build_registry(launch.config)
    device = device_name(registry, launch.config.model.device, launch.device)
    beats = Beats(context, launch.name, launch.control, launch.beat_seconds, device)
    uplink = RankUplink(context, launch.link, launch.answers)
    with registry.lifetime(launch.config):
        mesh = join(launch.store, launch.rank, launch.config.model.ranks)
        follower = Follower(launch.rank, uplink, beats, mesh, launch.device, child.freeze)
        follower.run(launch.config, registry)
    uplink.close()
    beats.close()


def main() -> int:
    """The process; its exit code."""
    return child.run(RankLaunch, run)


if __name__ == "__main__":
    child.leave(main())
