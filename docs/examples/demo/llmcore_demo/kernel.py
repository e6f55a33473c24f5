"""silu(gate) * up, the two halves of one tensor."""

import torch
from llmcore.api import OpContext


def make(context: OpContext):
    """Called once per shape and token bucket. The layer calls the returned function in every step."""

    def run(x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    return run
