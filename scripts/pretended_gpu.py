"""A GPU that is not there: the kernels, layers and launches of an H200 on any machine. Used by variants.py.

Models are those of `benchmarks/configs`, on the CPU. Kernels are neither compiled nor run: a launch ends where
Triton's launcher would enter C. The device is one step ahead, and its graphs replay nothing. This file is also the
plugin that brings the device.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from llmcore.api import DeviceInfo, DeviceSpec, hookimpl
from llmcore.builtin.devices.cpu import CPU

CONFIGS = Path(__file__).resolve().parent.parent / "benchmarks" / "configs"
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
"""Small sizes, for quick steps."""


class Pretended(CPU):
    """The CPU, for which kernels are chosen as for an H200. Values that come to the host are zeros."""

    ahead = 1
    graphs = True
    graph_memory = 0

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.info = INFO

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Runs the work once. Returns a graph and the result."""
        return self, work()

    def replay(self) -> None:
        """Does nothing."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ids of the vocabulary: no kernel wrote the memory."""
        return torch.zeros_like(tensor)


@hookimpl
def register_devices() -> Iterable[DeviceSpec]:
    """`pretended`."""
    yield DeviceSpec(name="pretended", make=f"{__name__}:Pretended", available=f"{__name__}:present")


def present() -> None:
    """Returns None: the device is always available."""


def pretend() -> None:
    """From now on Triton's launches do everything except enter C, and products are allocations."""
    from llmcore_triton import launch
    from triton.backends.nvidia import driver
    from triton.runtime import driver as runtime
    from triton.runtime.jit import JITFunction

    class Utils:
        @staticmethod
        def fill_tma_descriptor(*arguments: Any) -> object:
            return arguments[0]

    class Driver:
        utils = Utils()

    class Compiled:
        function, packed_metadata = 1, (4, 1, 0)

        def __init__(self, arguments: tuple[Any, ...]) -> None:
            boxes = [argument for argument in arguments if hasattr(argument, "from_tensor")]
            described = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False}
            metas = [{**described, "block_size": box.block_shape} for box in boxes]
            signature = {
                i: "tensordesc<bf16[1, 1]>" if hasattr(argument, "from_tensor") else "*bf16"
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

    def scaled_product(x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor, **more: Any) -> torch.Tensor:
        return x.new_empty(len(x), weight.shape[1], dtype=more["out_dtype"])

    runtime.set_active(Driver())
    JITFunction.run = first_launch
    launch.place = lambda context: torch.device("cpu")
    launch._device = lambda: 0
    launch._stream = lambda device: 0
    torch.nn.functional.linear = product
    torch._scaled_mm = scaled_product


@contextmanager
def engine_of(model: str, sizes: Mapping[str, int], **settings: Any) -> Iterator[Any]:
    """Yields an engine of a `model` of benchmarks/configs, with the prefix cache. `sizes` replace those of its
    config."""
    from llmcore.config import make_config
    from llmcore_devtools.bench.engine_runs import BenchEngine

    given: dict[str, Any] = json.loads((CONFIGS / model / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        cut = {name: size for name, size in sizes.items() if given.get(name) is not None}
        (Path(folder) / "config.json").write_text(json.dumps({**given, **cut}))
        chosen: dict[str, Any] = {
            "model_dir": folder,
            "load_format": "dummy",
            "device": "pretended",
            "plugins": ["triton", "quantization", "llama", "qwen", "deepseek", "contrib-models", __file__],
            # the host needs true lengths where it looks for cached tokens
            "kernel": ["step_inputs=torch"],
        }
        with BenchEngine(make_config(**chosen | settings), prefix_cache=True) as bench:
            yield bench
