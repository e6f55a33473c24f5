"""A balancer: it keeps requests that begin alike on one place, whatever the load."""

from zlib import crc32

from llmcore.api import BalancerSpec, hookimpl


@hookimpl
def register_balancers():
    yield BalancerSpec(name="sticky", make=f"{__name__}:Sticky")


class Sticky:
    """api.balancing.Balancer. A hash of key and name chooses, so all routers agree; short prompts go anywhere."""

    def __init__(self, random):
        self.random = random

    def choose(self, arrival, candidates):
        if arrival.tokens < 64:
            return self.random.randrange(len(candidates))
        return max(range(len(candidates)), key=lambda index: crc32(f"{arrival.key} {candidates[index].name}".encode()))
