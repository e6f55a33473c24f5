"""Times the Triton linears for few tokens beside cuBLAS on this GPU, in every configuration that is worth timing.

    python benchmarks/linear_gpu.py [--tokens 1,16,64] [--shapes qkv,down] [--processes 16]

Shapes are Llama-3.1-8B's. Calls are replayed in CUDA graphs, over weights that rotate so that no cache holds them.
Prints per shape and token count cuBLAS's time, the best configuration's, and TB/s of weights for both. `benchmarks/
tune.py` does this for whole models and writes tables; this shows what one change to a kernel does, in a minute.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from llmcore.api import OpContext, bucket_of
from llmcore.builtin.devices import cuda
from llmcore_triton import linear, linear_gemv
from tune import replayed

SHAPES = dict(qkv=(6144, 4096), o=(4096, 4096), gate_up=(28672, 4096), down=(4096, 14336), head=(128256, 4096))
COLD = 256 << 20
"""Bytes of weights among which calls rotate."""


def context_for(shape: str, tokens: int) -> OpContext:
    outputs, inputs = SHAPES[shape]
    sizes = {"inputs": inputs, "outputs": outputs, "bias": False}
    return OpContext(op="linear", device=cuda.make().info, dtype="bf16", bucket=bucket_of(tokens), shape=sizes)


def configurations(context: OpContext) -> list[tuple[Any, dict[str, Any]]]:
    modules = [linear, linear_gemv] if context.bucket == 0 else [linear]
    return [(module, config) for module in modules for config in module.candidates(context)]


@torch.inference_mode()
def compile_some(share: int, of: int, shapes: list[str], counts: list[int]) -> None:
    """Run every `of`-th configuration once: Triton keeps what it compiled on disk."""
    for shape in shapes:
        weight = torch.empty(SHAPES[shape], dtype=torch.bfloat16, device="cuda")
        for tokens in counts:
            # a configuration is one process's, whatever the shape, for it is mostly compiled once for all shapes
            for index, (module, config) in enumerate(configurations(context := context_for(shape, tokens))):
                if index % of == share:
                    module.make_with(context, config)(weight[:tokens], weight)
        torch.cuda.synchronize()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,16,32,64")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes, counts = options.shapes.split(","), [int(tokens) for tokens in options.tokens.split(",")]
    start, many = time.perf_counter(), options.processes
    if options.share is not None:
        compile_some(options.share, many, shapes, counts)
        return
    children = [subprocess.Popen([sys.executable, *sys.argv, "--share", str(share)]) for share in range(many)]
    if any([child.wait() for child in children]):
        sys.exit("a process that compiles has failed")
    print(f"{torch.cuda.get_device_name()}; compiled in {time.perf_counter() - start:.0f} s")
    print("shape    tokens   cuBLAS us  TB/s     ours us  TB/s  configuration")
    for shape in shapes:
        outputs, inputs = SHAPES[shape]
        size = 2 * outputs * inputs
        weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") for _ in range(-(-COLD // size))]
        for tokens in counts:
            x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device="cuda")
            theirs = replayed([lambda w=weight: F.linear(x, w) for weight in weights])  # noqa: B023
            best, how = math.inf, ""
            for module, config in configurations(context := context_for(shape, tokens)):
                op = module.make_with(context, config)
                took = replayed([lambda w=weight: op(x, w) for weight in weights])  # noqa: B023
                best, how = min((best, how), (took, f"{module.KERNEL} {config}"))
            rates = [size / us / 1e6 for us in (theirs, best)]
            print(f"{shape:8}{tokens:7}{theirs:12.2f}{rates[0]:6.2f}{best:12.2f}{rates[1]:6.2f}  {how}", flush=True)


if __name__ == "__main__":
    main()
