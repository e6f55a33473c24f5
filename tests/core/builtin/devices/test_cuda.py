"""A GPU as a device, as far as a machine without one can tell."""

from __future__ import annotations

import torch
from llmcore.builtin.devices import cuda


def test_a_gpu_that_is_not_there_says_what_to_do() -> None:
    reason = cuda.available()
    assert torch.cuda.is_available() or (reason is not None and ("install" in reason or "check" in reason))
