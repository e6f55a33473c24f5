"""The ops over several GPUs of a host, in one table: microseconds per call inside a captured CUDA graph.

    python benchmarks/comm.py [--ranks 2] [--hidden 4096] [--vocab 128256] [--calls 10000] [--out FOLDER]

Rows are counts of tokens. Columns are kernels:

- nccl, one_shot, two_shot: the sum over the ranks of [tokens, hidden]
- `+ norm`: the sum together with the residual and the norm that follow it; NCCL leaves these to a second launch
- gather: the gather of [tokens, vocabulary / ranks]
- exchange: the gather of two numbers per token

Each kernel is first compared with the sum in f32 in rank order. one_shot and two_shot must have the same bits. Then
the script makes `--calls` sums with residual and norm, of changing sizes and by turns through both, each from the
results of those before. They must leave the same bits on all ranks. The script starts a process for each rank. Exit
code 1 if a comparison fails.

`--out plugins/triton/llmcore_triton/tuned` writes the times of one_shot and two_shot for this number of ranks and this
hidden size into the table of this GPU. From then on the faster one is chosen in each token bucket.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from llmcore.api.specs import DeviceInfo, OpContext, bucket_of
from llmcore.builtin.devices.cuda import CUDA
from llmcore.config import Config
from llmcore.ops import Op, add_rms_norm
from llmcore.ops.comm import Peers, connect
from llmcore.registry.loader import build_registry, load, select
from llmcore.registry.resolve import candidates_for
from llmcore_triton.tuned import written
from torch.distributed import FileStore

TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
GATHERED = (1, 8, 32, 64, 128, 256)
SECONDS = 60.0
"""A rank that waits longer for another one fails."""
EPS = 1e-5
SHARED = ("one_shot", "two_shot")
"""The kernels that sum through shared memory."""


class Rank:
    """One rank: its GPU, and the kernels over the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rank = options, options.rank
        self.device = CUDA(options.rank)
        self.peers: Peers = connect(FileStore(options.store, options.ranks), options.rank, options.ranks, SECONDS)
        self.registry = build_registry(Config(discovered=select(None).plugins))
        self.good = True
        self.times: dict[tuple[str, str, int], list[float]] = {}
        """(op, kernel, token bucket) -> microseconds of its cases."""

    def op(self, name: str, kernel: str, size: int, tokens: int) -> Op:
        """The kernel of an op for rows of `size` bf16 numbers."""
        shape = {"size": size}
        if name != "add_rms_norm":
            shape |= {"group": "attn_tp", "ranks": self.options.ranks}
        info: DeviceInfo = self.device.info
        bucket = bucket_of(tokens)
        context = OpContext(op=name, device=info, dtype="bf16", bucket=bucket, shape=shape, peers=self.peers)
        found = next(spec for spec, _ in candidates_for(self.registry, name) if spec.name == kernel)
        made: Op = load(found.make)(context)
        return made

    def timed(self, work: Callable[[], object], calls: int = 32) -> float:
        """Microseconds of a call within a graph of `calls`; the slowest rank's."""
        for _ in range(2):
            work()
        self.device.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
        mine = torch.tensor([statistics.median(times)])
        return max(float(other) for other in self.peers.gathered(mine))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def expect(self, fine: bool, what: str) -> None:
        """Note a comparison that failed on this rank."""
        if not fine:
            self.good = False
            print(f"rank {self.rank}: {what}", flush=True)

    def rows(self, tokens: int, size: int) -> torch.Tensor:
        """Rows that differ between ranks."""
        draw = torch.Generator(self.device.torch_device).manual_seed(1000 * tokens + self.rank)
        return torch.randn(tokens, size, generator=draw, device=self.device.torch_device).bfloat16()


def sums(rank: Rank) -> None:
    """Times and comparisons of the sums, without and with the norm behind them."""
    size, names = rank.options.hidden, ("nccl", *SHARED)
    rank.say(
        f"{'tokens':>8} {'KiB':>8}" + "".join(f" {name:>16}" for name in (*names, *(f"{n} + norm" for n in names)))
    )
    weight = torch.rand(size, device=rank.device.torch_device).bfloat16()
    for tokens in TOKENS:
        x = rank.rows(tokens, size)
        total = torch.zeros_like(x, dtype=torch.float32)
        for other in rank.peers.gathered(x):
            total += other.float()
        residual = rank.rows(tokens, size)
        residual.copy_(rank.peers.first(residual))
        wanted = add_rms_norm.reference(total.bfloat16(), residual, weight, EPS)
        norm = rank.op("add_rms_norm", "triton", size, tokens)
        plain = {name: rank.op("comm.all_reduce", name, size, tokens) for name in names}
        fused: dict[str, Op] = {name: rank.op("reduce_add_rms_norm", name, size, tokens) for name in SHARED}
        fused["nccl"] = lambda x, *rest, op=plain["nccl"], then=norm: then(op(x), *rest)  # type: ignore[misc]
        exact = fused[SHARED[0]](x.clone(), residual.clone(), weight, EPS)
        for name in names:
            rank.expect(close(plain[name](x), total), f"{name} sums {tokens} tokens wrongly")
            found = fused[name](x.clone(), residual.clone(), weight, EPS)
            rank.expect(all(map(close, found, wanted)), f"{name} norms the sum of {tokens} tokens wrongly")
            if name in SHARED:
                same = [torch.equal(plain[name](x), total.bfloat16()), *map(torch.equal, found, exact)]
                rank.expect(all(same), f"{name} has other bits for {tokens} tokens")
        times = [
            *(rank.timed(lambda op=plain[name], x=x: op(x)) for name in names),  # type: ignore[misc]
            *(rank.timed(lambda op=fused[name], x=x, r=residual: op(x, r, weight, EPS)) for name in names),  # type: ignore[misc]
        ]
        keys = [(op, name) for op in ("comm.all_reduce", "reduce_add_rms_norm") for name in names]
        for key, us in zip(keys, times, strict=True):
            rank.times.setdefault((*key, bucket_of(tokens)), []).append(us)
        rank.say(f"{tokens:>8} {x.nbytes / 1024:>8,.0f}" + "".join(f" {us:>16.1f}" for us in times))


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """True if they differ by rounding alone; NCCL decides the order of its summands."""
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    return bool(error < 1e-2)


def table(rank: Rank) -> None:
    """Write the times of the sums through shared memory to the table by which kernels are chosen."""
    entries = [
        {
            **{"op": op, "kernel": name, "dtype": "bf16", "bucket": bucket},
            **{"shape": {"ranks": rank.options.ranks, "size": rank.options.hidden}},
            **{"us": round(statistics.geometric_mean(times), 2), "config": {}},
        }
        for (op, name, bucket), times in rank.times.items()
        if name in SHARED
    ]
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if rank.rank == 0:
        print(f"\n{len(entries)} entries in {written(rank.options.out, entries, rank.device.info, versions)}")


def gathers(rank: Rank) -> None:
    part = rank.options.vocab // rank.options.ranks
    names = ("nccl", "one_shot")
    rank.say(f"\n{'tokens':>8} {'gather: nccl':>13} {'one_shot':>9} {'exchange of 2: nccl':>20} {'one_shot':>9}")
    for tokens in GATHERED:
        x, few = rank.rows(tokens, part), rank.rows(tokens, 2).float()
        whole, all_few = torch.cat(rank.peers.gathered(x), 1), torch.stack(rank.peers.gathered(few))
        times = []
        for op, size, given, right in (("all_gather", part, x, whole), ("exchange", 2, few, all_few)):
            for name in names:
                made = rank.op(f"comm.{op}", name, size, tokens)
                rank.expect(torch.equal(made(given), right), f"{name} {op} of {tokens} tokens is wrong")
                times.append(rank.timed(lambda op=made, x=given: op(x)))  # type: ignore[misc]
        a, b, c, d = times
        rank.say(f"{tokens:>8} {a:>13.1f} {b:>9.1f} {c:>20.1f} {d:>9.1f}")


def long_run(rank: Rank) -> None:
    """Sums of changing sizes, each from the results of those before."""
    size, calls = rank.options.hidden, rank.options.calls
    weight = torch.ones(size, device=rank.device.torch_device).bfloat16()
    residual = torch.zeros(64, size, device=rank.device.torch_device).bfloat16()
    x = rank.rows(64, size)
    fused = [rank.op("reduce_add_rms_norm", name, size, 64) for name in SHARED]
    for call in range(calls):
        tokens = 1 + call * 37 % 64
        fused[call // 3 % 2]((x[:tokens] * 0.5).add_(rank.rank), residual[:tokens], weight, EPS)
        residual.mul_(0.5)
    sums = zlib.crc32(residual.cpu().view(torch.uint8).numpy())
    every = {int(found) for found in rank.peers.gathered(torch.tensor([sums]))}
    rank.expect(len(every) == 1, f"after {calls} calls the ranks' bits differ: {every}")
    rank.say(f"\n{calls} sums of 1 to 64 tokens: {'the same bits on all ranks' if len(every) == 1 else 'FAILED'}")


def as_rank(options: argparse.Namespace) -> int:
    rank = Rank(options)
    rank.say(f"{options.ranks} x {rank.device.info.name}, torch {torch.__version__}; microseconds")
    with torch.inference_mode():
        sums(rank)
        gathers(rank)
        long_run(rank)
    if options.out is not None and rank.good:
        table(rank)
    sys.stdout.flush()
    os._exit(0 if rank.good else 1)  # NCCL may wait for ever when a communicator is destroyed


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="folder of tuned tables, for the times of the sums")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.rank is not None:
        return as_rank(options)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *given, "--store", f"{folder}/store", "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(options.ranks)]
        codes = [rank.wait() for rank in ranks]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
