"""One NVIDIA GPU. The host enqueues; events say how far the GPU has come."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from llmcore.api import DeviceInfo

T = TypeVar("T")


class CUDA:
    """Implements protocols.Device for the GPU with this index among those that the process sees."""

    ahead = 1
    step_tokens = 8192
    prefill_stall_ms = 20.0
    measured = True
    graphs = True

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.info = DeviceInfo(
            type="cuda",
            name=properties.name,
            capability=10 * properties.major + properties.minor,
            memory=properties.total_memory,
            processors=properties.multi_processor_count,
        )
        self.graph_memory = 0
        self._pool: Any = None
        self._capturing = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], T]) -> tuple[CUDAGraph, T]:
        """A CUDA graph; all of this device share one memory pool, which is right because they run one by one."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before, _ = torch.cuda.mem_get_info(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would first give back the memory that torch holds, and the next steps ask for it again.
        with torch.cuda.stream(self._capturing):
            # Other threads of this process may use the GPU meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that the graph is empty, which nobody will replay
                    graph.capture_end()
                raise
            graph.capture_end()
        after, _ = torch.cuda.mem_get_info(self.torch_device)
        self.graph_memory += max(before - after, 0)
        return CUDAGraph(graph), result

    def forget_graphs(self) -> None:
        """Their pool goes when the last of them does."""
        gc.collect()
        self._pool, self.graph_memory = None, 0
        torch.cuda.empty_cache()

    def kv_budget(self, fraction: float) -> int:
        """The share of all memory, less what others hold and the most torch has held at once."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        others = total - free - torch.cuda.memory_reserved(self.torch_device)
        return max(int(total * fraction) - others - self.peak_memory(), 0)

    def sticky(self, error: BaseException) -> bool:
        """Everything that the driver reports, except that memory ran out."""
        return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)

    def free_memory(self) -> int:
        """What the driver has left and what torch holds without using it."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + unused

    def peak_memory(self) -> int:
        """Most bytes in torch's tensors at once since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        """Start anew, and return what torch holds without using it."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Page-locked memory with the same content."""
        return tensor.pin_memory()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on its way into page-locked memory."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def event(self) -> CUDAEvent:
        """Record an event on the current stream."""
        return CUDAEvent()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.torch_device)


class CUDAGraph:
    """Implements protocols.Graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.replay = graph.replay


class CUDAEvent:
    """Implements protocols.Event; recorded when it is made."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        """Whether the stream has passed it."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until it has."""
        self._event.synchronize()


def make(index: int) -> CUDA:
    """DeviceSpec.make."""
    return CUDA(index)


def available() -> str | None:
    """Why there is no GPU to use, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU or driver; check nvidia-smi"
    return None
