"""One NVIDIA GPU. The host enqueues work, and events tell which work the GPU has finished."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from llmcore.api import ConfigError, DeviceInfo

T = TypeVar("T")


class CUDA:
    """Implements protocols.Device for the GPU with this index among those that the process sees."""

    ahead = 1
    step_tokens = 8192
    prefill_stall_ms = 16.0
    measured = True
    graphs = True

    def __init__(self, index: int) -> None:
        """Raises ConfigError if there are not so many GPUs."""
        if index >= (seen := torch.cuda.device_count()):
            raise ConfigError(
                f"GPU number {index} is needed, counted from 0, and this process sees {seen}; lower --tp or --dp, or "
                "check CUDA_VISIBLE_DEVICES and nvidia-smi"
            )
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
        """Capture `work` as a CUDA graph; returns the graph and the result of `work`.

        All graphs of this device share one memory pool, which is safe because they never run at the same time.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before, _ = torch.cuda.mem_get_info(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would first return torch's cached memory, and the next steps would ask for it again.
        with torch.cuda.stream(self._capturing):
            # thread_local: other threads of this process may use the GPU during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns if the graph is empty; it is never replayed.
                    graph.capture_end()
                raise
            graph.capture_end()
        after, _ = torch.cuda.mem_get_info(self.torch_device)
        self.graph_memory += max(before - after, 0)
        return CUDAGraph(graph), result

    def forget_graphs(self) -> None:
        """Drop the memory pool of the graphs. The caller has dropped all graphs, so torch can free the pool."""
        gc.collect()
        self._pool, self.graph_memory = None, 0
        torch.cuda.empty_cache()

    def kv_budget(self, fraction: float) -> int:
        """`fraction` of all memory, less the memory of other users of the GPU and torch's peak, in bytes."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        others = total - free - torch.cuda.memory_reserved(self.torch_device)
        return max(int(total * fraction) - others - self.peak_memory(), 0)

    def sticky(self, error: BaseException) -> bool:
        """True for every error that the driver reports, except out of memory."""
        return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)

    def free_memory(self) -> int:
        """Bytes that the driver has free, plus bytes that torch caches and does not use."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + unused

    def peak_memory(self) -> int:
        """The most bytes that torch's tensors took at once since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        """Reset `peak_memory`, and return torch's unused cached memory to the driver."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor in page-locked memory."""
        return tensor.pin_memory()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in page-locked memory. It is complete once an event that was recorded after this call has passed."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def event(self) -> CUDAEvent:
        """Record an event on the current stream."""
        return CUDAEvent()

    def synchronize(self) -> None:
        """Wait until the GPU has finished all enqueued work."""
        torch.cuda.synchronize(self.torch_device)


class CUDAGraph:
    """Implements protocols.Graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.replay = graph.replay


class CUDAEvent:
    """Implements protocols.Event. The constructor records it on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        """True if the stream has passed the event."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until the stream has passed the event."""
        self._event.synchronize()


def available() -> str | None:
    """The reason why this process cannot use a GPU, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU or driver; check nvidia-smi"
    return None
