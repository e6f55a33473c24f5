"""A gated MLP's gate, up and activation for many tokens: in one launch, and by cuBLAS and silu_and_mul.

    python benchmarks/gated_gpu.py [--model llama-3.1-8b] [--tokens 128 512 8192 ...] [--set stages=4 ...]

Each variant runs for a second. The power limit acts only after a while. Calls are in a CUDA graph, over weights that
rotate. The separate kernels run before and after the single launch. `wanted` is the useful share of the launch's
multiplications, by which the kernel decides for itself. Errors are relative L2 distances from the result in f32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from gpu import CONFIGS
from gpu_bound import Shape, kept_up
from llmcore.api.specs import OpContext, bucket_of
from llmcore.config import Config
from llmcore.engine.model import pick_device
from llmcore.registry.loader import build_registry, discover
from llmcore_triton import linear_gated, silu_and_mul

TOKENS = (128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024, 2048, 8192)
COPIES = 2
"""Copies of the weights that calls take in turn. One is larger than an L2 cache."""

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Returns the relative L2 distance from the result in f32."""
    gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
    expected = F.silu(gate) * up
    return float((got.float() - expected).norm() / expected.norm())


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in benchmarks/configs")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=N", help="instead of what was tuned")
    options = parser.parse_args()
    device = pick_device(build_registry(Config(discovered=discover(None))), "auto")
    shape = Shape.of(CONFIGS / options.model)
    if device.torch_device.type == "cpu" or shape is None:
        raise SystemExit("gated_gpu.py wants a GPU and a dense model")
    change = {name: int(value) for name, _, value in (part.partition("=") for part in options.set)}
    weights = [
        torch.randn(2 * shape.inner, shape.hidden, dtype=torch.bfloat16, device="cuda") / 50 for _ in range(COPIES)
    ]
    print(f"{'tokens':>6} {'wanted':>7} {'apart, us':>17} {'one launch':>11}  errors, apart and in one")
    for tokens in options.tokens:
        sizes = {"inputs": shape.hidden, "size": shape.inner}
        context = OpContext(
            op="linear_silu_and_mul", device=device.info, dtype="bf16", bucket=bucket_of(tokens), shape=sizes
        )
        activation = silu_and_mul.make(replace(context, op="silu_and_mul", shape={"size": shape.inner}))
        with patch.object(linear_gated, "WANTED", {context.bucket: 0.0}):
            whole = linear_gated.make_with(context, change) if change else linear_gated.make(context)
        x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, device="cuda")
        apart: Call = lambda x, weight, of=activation: of(F.linear(x, weight))  # noqa: E731
        took = [
            1e6 / COPIES * kept_up(lambda call=call, x=x: [call(x, weight) for weight in weights])
            for call in (apart, whole, apart)
        ]
        errors = [error(call(x, weights[0]), x, weights[0]) for call in (apart, whole)]
        both = f"{took[0]:.1f}, {took[2]:.1f}"
        print(
            f"{tokens:6} {whole.wanted(tokens):7.3f} {both:>17} {took[1]:11.1f}  {errors[0]:.2e}, {errors[1]:.2e}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
