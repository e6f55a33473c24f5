"""A kind of device: the CPU under another name. It counts how often something waits for it."""

from llmcore.api import DeviceInfo, DeviceSpec, hookimpl


@hookimpl
def register_devices():
    yield DeviceSpec(
        name="counting-cpu",
        make=f"{__name__}:CountingCPU",
        available=f"{__name__}:available",
        named=f"{__name__}:named",
        priority=0,
    )


def available():
    """Returns why the device cannot be used here, or None."""
    import os

    return None if os.cpu_count() else "this machine has no CPU"


def named(text):
    """Returns the device that a name means, for `llmcore kernels --device`."""
    return DeviceInfo("cpu", name=text) if text == "counting-cpu" else None


class Passed:
    """An event of a device that finishes all work at once."""

    def done(self):
        return True

    def wait(self):
        pass


class CountingCPU:
    """protocols.Device."""

    info = DeviceInfo("cpu", name="counting-cpu")
    ahead = 0
    step_tokens = 2048
    prefill_stall_ms = 0.0
    measured = False
    graphs = False

    def __init__(self, index):
        import torch

        self.torch_device = torch.device("cpu")
        self.waits = 0

    def free_memory(self):
        return 1 << 30

    def kv_budget(self, fraction):
        return 1 << 28

    def peak_memory(self):
        return 0

    def reset_peak(self):
        pass

    def pinned(self, tensor):
        return tensor

    def to_host(self, tensor):
        return tensor

    def sticky(self, error):
        return False

    def event(self):
        return Passed()

    def synchronize(self):
        self.waits += 1
