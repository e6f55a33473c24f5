"""The host's time for an eager step, on any machine and without a GPU: microseconds by layer and by op.

    OMP_NUM_THREADS=1 python benchmarks/host_cost.py [--model deepseek-v2-lite ...] [--prefix 512] [--lines 30]

The script builds a model of `benchmarks/configs` on the CPU. It has the kernels, layers and launches of an H200, with
narrow tensors. Kernels are neither compiled nor run: a launch ends where Triton's launcher would enter C. A prompt's
last chunk is stepped many times. The script shows the CPU time of the fastest tenth of the steps, because a busy
machine only adds to it. Its parts are shares of a timer that samples the stack every 200 microseconds. `--lines` also
lists the lines that it found most often.

The driver's time for a launch and for encoding a TMA descriptor is not measured. Nor is cuBLAS: a product is an
allocation here. Nor is the extra cost of torch's CUDA allocator and operators over their CPU counterparts. A GPU's
step costs the host that much more. Differences between two runs of this script carry over.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from llmcore.api import DeviceInfo, DeviceSpec, hookimpl
from llmcore.builtin.devices.cpu import CPU

HERE = Path(__file__).resolve().parent
INFO = DeviceInfo("cuda", "NVIDIA H200", capability=90, memory=140 << 30, processors=132)
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 512,
}
"""Sizes that leave the host's work as it is. Only those that a config has are changed."""

CHUNK = 272
"""Tokens of a step: a little more than the fewest of the last bucket."""

INTERVAL = 2e-4
"""Seconds between two samples of the stack."""


class Pretended(CPU):
    """The CPU, for which kernels are chosen as for an H200."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.info = INFO


@hookimpl
def register_devices() -> Iterable[DeviceSpec]:
    """The script registers itself as a plugin."""
    here = f"{__name__}:"
    yield DeviceSpec(name="pretended", make=f"{here}Pretended", available=f"{here}present", summary="no GPU")


def present() -> None:
    """Returns None: the device is always available."""


def pretend() -> None:
    """From now on Triton's launches do everything except enter C, and products are allocations."""
    from llmcore_triton import launch
    from triton.backends.nvidia import driver
    from triton.runtime import driver as runtime
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    class Utils:
        @staticmethod
        def fill_tma_descriptor(*arguments: Any) -> object:
            return arguments[0]

    class Driver:
        utils = Utils()

    class Compiled:
        function, packed_metadata = 1, (4, 1, 0)

        def __init__(self, arguments: tuple[Any, ...]) -> None:
            boxes = [argument for argument in arguments if isinstance(argument, TensorDescriptor)]
            described = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False}
            metas = [{**described, "block_size": box.block_shape} for box in boxes]
            signature = {
                i: "tensordesc<bf16[1, 1]>" if isinstance(argument, TensorDescriptor) else "*bf16"
                for i, argument in enumerate(arguments)
            }
            run = driver.CudaLauncher.__new__(driver.CudaLauncher)
            run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
            run.global_scratch_size = run.profile_scratch_size = 0
            run.global_scratch_align = run.profile_scratch_align = 1
            run.launch = driver.wrap_handle_tensordesc(into_c, signature, metas)
            self.run = run

    def into_c(*arguments: Any) -> None:
        """Stands for the C launcher, and does nothing."""

    def first_launch(self: Any, *arguments: Any, grid: Any, warmup: bool, **fixed: Any) -> Compiled:
        return Compiled(arguments)

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x.new_empty(len(x), len(weight))

    runtime.set_active(Driver())
    JITFunction.run = first_launch
    launch.place = lambda context: torch.device("cpu")
    launch._device = lambda: 0
    launch._stream = lambda device: 0
    torch.nn.functional.linear = product


@contextmanager
def engine_of(model: str, length: int, *, prefix_cache: bool = False, **settings: Any) -> Iterator[Any]:
    """Yields an engine of a narrow `model` for prompts of `length`. Its steps have up to CHUNK tokens unless
    `settings` say otherwise."""
    from llmcore.config import make_config
    from llmcore_devtools.bench.engine_runs import BenchEngine

    given = _config(model)
    with tempfile.TemporaryDirectory() as folder:
        cut = {name: size for name, size in NARROW.items() if given.get(name) is not None}
        (Path(folder) / "config.json").write_text(json.dumps({**given, **cut}))
        chosen: dict[str, Any] = {
            "model_dir": folder,
            "load_format": "dummy",
            "device": "pretended",
            "plugins": ["triton", "llama", "qwen", "deepseek", __file__],
            # the host needs true lengths where it looks for cached tokens
            "kernel": ["step_inputs=torch"],
            "max_total_token_num": 2 * length,
            "max_req_total_len": 2 * length,
            "batch_max_tokens": CHUNK,
            "running_max_req_size": 2,
        }
        with BenchEngine(make_config(**chosen | settings), prefix_cache=prefix_cache) as bench:
            yield bench


def _config(model: str) -> dict[str, Any]:
    given: dict[str, Any] = json.loads((HERE / "configs" / model / "config.json").read_text())
    return given


Stack = list[tuple[CodeType, int]]
"""Code and line of a stack's frames, the innermost first."""


def place_of(stack: Stack) -> tuple[str, str]:
    """Returns (part of the step, op or layer in it). Launches are separate from the other work of kernels."""
    op = part = ""
    launching = False
    for code, _ in stack:
        file = Path(code.co_filename)
        if file.stem in ("launch", "entry") or file.parent.name == "nvidia":
            launching = True
        elif "llmcore_triton" in file.parts:
            op = f"kernel {file.stem}"
        elif file.parent.name == "layers":
            op = op or f"layer {file.stem}"
            part = "model" if file.stem == "decoder" else part
        elif file.parent.name in ("engine", "sched"):
            part = part or f"{file.parent.name} {file.stem}"
    return part or "other", f"{op}, launch" if launching else op


def line_of(stack: Stack) -> str:
    """Returns the host's line."""
    code, line = stack[0]
    file = Path(code.co_filename)
    return f"{file.parent.name}/{file.stem}:{code.co_name}:{line}"


def last_chunks(bench: Any, prefix: int, count: int, around: Callable[[], Any] = nullcontext) -> list[float]:
    """Returns the seconds of `count` steps of a prompt's last chunk, each inside `around()`."""
    seconds = []
    for _ in range(count):
        bench.engine.submit(bench.request(prefix + CHUNK, 1))
        for _ in range(prefix // CHUNK):
            bench.engine.step()
        with around():
            began = time.thread_time()
            bench.engine.step()
            seconds.append(time.thread_time() - began)
        while not bench.engine.idle:
            bench.engine.step()
    return seconds


class Looks:
    """The stacks that a timer found while it was on."""

    def __init__(self) -> None:
        self.stacks: list[Stack] = []
        self._on = False
        signal.signal(signal.SIGALRM, self._look)

    def _look(self, number: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        self.stacks.append(stack)
        if self._on:
            signal.setitimer(signal.ITIMER_REAL, INTERVAL)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Samples until the block is left."""
        self._on = True
        signal.setitimer(signal.ITIMER_REAL, INTERVAL)
        try:
            yield
        finally:
            self._on = False
            signal.setitimer(signal.ITIMER_REAL, 0)


def report(model: str, prefix: int, count: int, lines: int) -> None:
    """Print a model's step: its time, its parts, and its ops."""
    layers = _config(model)["num_hidden_layers"]
    with engine_of(model, prefix + CHUNK + 1) as bench:
        last_chunks(bench, prefix, count // 4 + 1)
        fast = statistics.quantiles(last_chunks(bench, prefix, count), n=10)[0] * 1e6
        looks = Looks()
        last_chunks(bench, prefix, 2 * count, looks.on)
    each = fast / len(looks.stacks)
    share = {place: each * times for place, times in Counter(map(place_of, looks.stacks)).items()}
    inside = sum(us for (part, _), us in share.items() if part == "model")
    print(
        f"{model}, {layers} layers, prefix of {prefix}: {fast / 1e3:.2f} ms a step, {inside / layers:.1f} us a layer"
    )
    for op, us in _sums((op, us) for (part, op), us in share.items() if part == "model"):
        print(f"  {us / layers:>8.1f} us a layer  {op}")
    for part, us in _sums((part, us) for (part, _), us in share.items() if part != "model"):
        print(f"  {us:>8.0f} us a step   {part}")
    for line, times in Counter(map(line_of, looks.stacks)).most_common(lines):
        print(f"  {each * times / layers:>8.1f} us a layer  {line}")


def _sums(items: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Adds up by name, the largest first. Sums below half a microsecond are left out."""
    found: Counter[str] = Counter()
    for name, us in items:
        found[name] += us  # type: ignore[assignment]
    return [(name, us) for name, us in found.most_common() if us >= 0.5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["llama-3.1-8b", "deepseek-v2-lite"])
    parser.add_argument("--prefix", type=int, default=0, help=f"cached tokens before the step's, in chunks of {CHUNK}")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lines", type=int, default=0, help="also list so many lines where the host was found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pretend()
    for model in options.model:
        report(model, -(-options.prefix // CHUNK) * CHUNK, options.steps, options.lines)


if __name__ == "__main__":
    main()
