"""Compiles for a Hopper every attention and KV kernel that an engine launches, and shows what each takes. No GPU.

    OMP_NUM_THREADS=1 python scripts/compile_kernels.py [--model llama-3.1-8b ...] [--mode NAME ...]

An engine with two layers and a small vocabulary on pretended_gpu.py runs the steps of a start, and then requests. Each
new kernel is compiled instead of launched: this needs only Triton. A line has:
- the registers of a thread, and the instructions that move spilled registers
- the bytes of shared memory
- the instructions for tensor cores, and all instructions of the longest loop (1: none)
- the seconds of the compiler, and the compile-time arguments

Exit code 1 if a kernel does not compile or does not fit. `--kernels` names other kernels. `--set NAME=VALUE` changes
the engine's settings, and `--size NAME=NUMBER` the model's config.
"""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pretended_gpu
import torch
import triton
import variants
from llmcore.engine.profile import measure, run_worst_case, warm_up

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KERNELS = (
    *("grouped", "per_head", "flash", "merge_row", "merge_tile", "over_latents"),
    *("rotate_and_store", "norm_turn_and_store"),
)
SMALL = {"num_hidden_layers": 2, "vocab_size": 512, "intermediate_size": 64, "moe_intermediate_size": 32}
"""Sizes that attention and KV do not know."""

MOST_SHARED = 227 << 10
"""Bytes of shared memory that a program may take on a Hopper."""

_TENSOR_CORES = re.compile(r"\b(?:HMMA|IMMA|[HIQ]GMMA)\b")
_SPILLED = re.compile(r"\b(?:LDL|STL)\b")
_LINE = re.compile(r"^\s*(?:(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(.*?);)", re.MULTILINE)
_JUMP = re.compile(r"\bBRA\b.*?(\.L_x_\d+)")


def longest_loop(sass: str) -> int:
    """Returns the instructions of the longest loop of a disassembled kernel."""
    labels: dict[str, int] = {}
    count, longest = 0, 0
    for label, instruction in _LINE.findall(sass):
        if label:
            labels[label] = count
            continue
        count += 1
        back = _JUMP.search(instruction)
        if back and back.group(1) in labels:
            longest = max(longest, count - labels[back.group(1)])
    return longest


class Compiled:
    """The kernels compiled so far. `failed`: how many do not compile or do not fit."""

    serving = False

    def __init__(self, kernels: Sequence[str], compiler: Callable[..., Any]) -> None:
        self._kernels, self._compiler = kernels, compiler
        self._known: set[variants.Variant] = set()
        self.failed = 0

    def see(self, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        """Compile the kernel of a launch, if it is new, and print what it takes."""
        variant = variants.variant_of(kernel, arguments, options)
        if variant in self._known or kernel.__name__ not in self._kernels:
            return
        self._known.add(variant)
        began = time.monotonic()
        try:
            compiled = self._compiler(kernel, *arguments, grid=(1,), warmup=True, **options)
        except Exception as error:  # noqa: BLE001 - the other kernels go on
            self.failed += 1
            print(f"{kernel.__name__}: {type(error).__name__}: {error}, {options}", flush=True)
            return
        seconds, shared = time.monotonic() - began, compiled.metadata.shared
        self.failed += shared > MOST_SHARED
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "cubin"
            cubin.write_bytes(compiled.asm["cubin"])
            sass, usage = (
                _said(*tool, cubin) for tool in (("nvdisasm", "-c"), ("cuobjdump", "--dump-resource-usage"))
            )
        registers = re.findall(r"REG:(\d+)", usage)[0]
        counts = f"{len(_SPILLED.findall(sass)):7}{shared:8}{len(_TENSOR_CORES.findall(sass)):5}{longest_loop(sass):6}"
        said = " ".join(f"{name}={value}" for name, value in options.items())
        print(f"{kernel.__name__:20}{registers:>5}{counts}{seconds:6.1f}  {said}", flush=True)


def _said(tool: str, *arguments: str | Path) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def compiling(kernels: Sequence[str]) -> Compiled:
    """From now on launches compile `kernels` for a Hopper, and do nothing else."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled = Compiled(kernels, JITFunction.run)
    pretended_gpu.pretend()
    launch, pretended = JITFunction.run, driver.active

    def seen(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.see(kernel, arguments, options)
        return launch(kernel, *arguments, grid=grid, warmup=warmup, **options)

    pretended.get_current_target = lambda: GPUTarget("cuda", pretended_gpu.INFO.capability, 32)
    pretended.get_current_device = pretended.get_current_stream = lambda *_: 0
    JITFunction.run = seen
    return compiled


def report(model: str, options: argparse.Namespace, compiled: Compiled) -> None:
    """Print a line for each kernel of one model."""
    print(f"{model} {' '.join(options.mode)}", flush=True)
    sizes = SMALL | {name: int(number) for name, number in options.size}
    settings = {
        "mode": options.mode,
        "max_req_total_len": variants.LENGTH,
        "max_total_token_num": 60_000,
        "batch_max_tokens": 8192,
        "running_max_req_size": 256,
        **{name: value == "true" if value in ("true", "false") else value for name, value in options.set},
    }
    with pretended_gpu.engine_of(model, sizes, **settings) as bench:
        runner, limits = bench.engine._runner, bench.engine._scheduler.limits
        granules = tuple(group.layout.granule for group in runner.groups)
        with torch.inference_mode():
            measure(runner, runner._device, limits, granules)
            run_worst_case(runner, runner._device, limits, granules)
            warm_up(runner, runner._device, limits)
        variants.requests_of(bench, options.steps, compiled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["llama-3.1-8b"])
    parser.add_argument("--mode", nargs="*", default=[], help="as in llmcore serve")
    parser.add_argument("--kernels", nargs="*", default=KERNELS)
    parser.add_argument("--steps", type=int, default=100)
    for name in ("--set", "--size"):
        parser.add_argument(name, nargs="*", default=[], type=lambda text: tuple(text.split("=", 1)))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    compiled = compiling(options.kernels)
    print(f"{'KERNEL':20}{'REGS':>5}{'SPILLS':>7}{'SHARED':>8}{'MMA':>5}{'LOOP':>6}{'S':>6}  ARGUMENTS")
    for model in options.model:
        report(model, options, compiled)
    return int(compiled.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
