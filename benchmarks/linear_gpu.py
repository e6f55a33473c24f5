"""Times every configuration of the Triton linears for few tokens on this GPU, and cuBLAS.

    python benchmarks/linear_gpu.py [--tokens 1,16,64] [--shapes qkv,down] [--processes 16]

Shapes are Llama-3.1-8B's. `gate_up_silu` is the linear and its activation, in one kernel or in cuBLAS's and Triton's.
Calls are replayed in CUDA graphs, over weights that rotate so that no cache holds them. The script prints microseconds
per shape and token count, for cuBLAS and for the best configuration of each kind of kernel. First comes the linear
alone, then a norm and the linear that reads its result, as in a model. There a kernel gains from loads before the norm
has ended. `benchmarks/tune.py` does this for whole models and writes tables. This script shows the effect of one
change to a kernel.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from llmcore.api import OpContext, bucket_of
from llmcore.builtin.devices import cuda
from llmcore_triton import add_rms_norm, linear, linear_gemv, silu_and_mul
from tune import replayed

SHAPES = dict(
    **dict(qkv=(6144, 4096), o=(4096, 4096), gate_up=(28672, 4096), gate_up_silu=(28672, 4096)),
    **dict(down=(4096, 14336), head=(128256, 4096)),
)
COLD = 256 << 20
"""Bytes of weights among which calls rotate."""

ROUNDING = 0.02
"""Tolerance, relative to the largest result."""

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def context_for(shape: str, tokens: int) -> OpContext:
    outputs, inputs = SHAPES[shape]
    fused = shape == "gate_up_silu"
    sizes = {"inputs": inputs, "size" if fused else "outputs": outputs // (1 + fused), "bias": False}
    return _context("linear_silu_and_mul" if fused else "linear", tokens, sizes)


def _context(op: str, tokens: int, sizes: dict[str, Any]) -> OpContext:
    return OpContext(op=op, device=cuda.make().info, dtype="bf16", bucket=bucket_of(tokens), shape=sizes)


def configurations(context: OpContext) -> list[tuple[str, Any, dict[str, Any]]]:
    """Returns (kind, module, configuration) of all."""
    found: list[tuple[str, Any, dict[str, Any]]] = []
    for config in linear.candidates(context):
        kind = ("TMA" if config["tma"] else "pointers") + (" early" if config["early"] else "")
        found.append((kind, linear, config))
    if context.bucket == 0:
        found += [("gemv", linear_gemv, config) for config in linear_gemv.candidates(context)]
    return found


def by_cublas(shape: str, tokens: int) -> Linear:
    if shape != "gate_up_silu":
        return F.linear
    activation = silu_and_mul.make(_context("silu_and_mul", tokens, {"size": SHAPES[shape][0] // 2}))
    return lambda x, w: activation(F.linear(x, w))


@torch.inference_mode()
def compile_some(share: int, of: int, shapes: list[str], counts: list[int]) -> None:
    """Run every `of`-th configuration once. Triton keeps the compiled kernels on disk."""
    # one process takes a configuration for all shapes, since it is mostly compiled once for all of them
    seen: dict[tuple[str, str, int], int] = {}
    for shape in shapes:
        weight = torch.empty(SHAPES[shape], dtype=torch.bfloat16, device="cuda")
        for tokens in counts:
            for _, module, config in configurations(context := context_for(shape, tokens)):
                padded = next(size for size in linear.PADDED if tokens <= size)
                if seen.setdefault((context.op, str(config), padded), len(seen)) % of == share:
                    _attempt(module, context, config, weight[:tokens], weight)
        torch.cuda.synchronize()


def _attempt(module: Any, context: OpContext, config: dict[str, Any], x: torch.Tensor, w: torch.Tensor) -> Any:
    """Returns (the kernel, its result). If it does not run, prints the reason and returns None."""
    try:
        op = module.make_with(context, config)
        return op, op(x, w)
    except Exception as error:  # noqa: BLE001 - the others are worth timing
        print(f"{context.op} {config}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        return None


def timed(op: Linear, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    return float(replayed([lambda w=weight: op(x, w) for weight in weights]))


def behind_a_norm(op: Linear, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    """Returns the time of the norm and the linear together."""
    tokens, size = x.shape
    norm = add_rms_norm.make(_context("add_rms_norm", tokens, {"size": size}))
    gain, residual = torch.ones_like(x[0]), torch.zeros_like(x)
    return float(replayed([lambda w=weight: (norm(x, residual, gain, 1e-5), op(x, w)) for weight in weights]))


def report(shape: str, tokens: int, weights: Sequence[torch.Tensor]) -> None:
    """Print one line of microseconds, and one per kind with its configuration."""
    x = torch.randn(tokens, SHAPES[shape][1], dtype=torch.bfloat16, device="cuda")
    theirs = by_cublas(shape, tokens)
    best: dict[str, tuple[float, str, Linear]] = {"cuBLAS": (timed(theirs, x, weights), "", theirs)}
    expected = theirs(x, weights[0])
    for kind, module, config in configurations(context := context_for(shape, tokens)):
        made = _attempt(module, context, config, x, weights[0])
        if made is None:
            continue
        op = made[0]
        took = timed(op, x, weights)
        # checked after many launches, because each launch leaves buffers to the next one
        wrong = float((op(x, weights[0]) - expected).abs().max() / expected.abs().max())
        if not wrong < ROUNDING:
            print(f"{shape} {tokens} tokens {config}: WRONG by {wrong:.3g}", flush=True)
        elif kind not in best or took < best[kind][0]:
            best[kind] = took, str(config), op
    floor = weights[0].nbytes / 4.2e6
    alone = "".join(f"  {kind} {took:7.2f}" for kind, (took, _, _) in best.items())
    after = "".join(f"  {kind} {behind_a_norm(op, x, weights):7.2f}" for kind, (_, _, op) in best.items())
    print(f"{shape:12} {tokens:3} tokens, floor {floor:6.1f}:{alone}   norm and linear:{after}")
    for kind, (_, how, _) in best.items():
        if how:
            print(f"{'':16}{kind}: {how}")
    sys.stdout.flush()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="8,16,32,64")
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
    print(f"{torch.cuda.get_device_name()}; compiled in {time.perf_counter() - start:.0f} s; floor at 4.2 TB/s")
    for shape in shapes:
        size = 2 * SHAPES[shape][0] * SHAPES[shape][1]
        weights = [torch.randn(SHAPES[shape], dtype=torch.bfloat16, device="cuda") for _ in range(-(-COLD // size))]
        for tokens in counts:
            report(shape, tokens, weights)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
