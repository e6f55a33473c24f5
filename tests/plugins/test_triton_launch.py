"""Launching a kernel: when Triton is asked anew, and when its compiled kernel is launched again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from llmcore_triton import launch


@dataclass
class Param:
    name: str
    is_constexpr: bool = False
    do_not_specialize: bool = False


class Compiled:
    """Notes what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launched.append(arguments)


class Kernel:
    """A kernel (x, n, stride, BLOCK); `compiled` in order."""

    __name__ = "kernel"
    params = (Param("x"), Param("n", do_not_specialize=True), Param("stride"), Param("BLOCK", is_constexpr=True))

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*arguments: Any, **options: Any) -> Compiled:
            self.options = options
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return compile_and_launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_device", lambda: 0)
    monkeypatch.setattr(launch, "_stream", lambda device: 77)
    return Kernel()


def test_a_second_launch_takes_the_compiled_kernel(kernel: Kernel) -> None:
    bound = launch.Bound(kernel, BLOCK=64, num_warps=4)
    x, y = torch.zeros(8), torch.ones(8)
    bound((3,), x, 5, 8)
    bound((2, 4), y, 6, 8)
    (compiled,) = kernel.compiled
    assert kernel.options == {"BLOCK": 64, "num_warps": 4}
    (seen,) = compiled.launched
    assert seen[:9] == (2, 4, 1, 77, "function", "metadata", None, None, None)
    assert seen[9] is y and seen[10:] == (6, 8, 64)


@pytest.mark.parametrize(
    ("other", "times"),
    [
        ((torch.zeros(8), 9, 8), 1),
        ((torch.zeros(8), 1 << 40, 8), 2),
        ((torch.zeros(8), 5, 4), 2),
        ((torch.zeros(8).half(), 5, 8), 2),
        ((torch.zeros(8)[1:], 5, 8), 2),
        ((None, 5, 8), 2),
    ],
    ids=["as many", "beyond 32 bits", "another stride", "another type", "not aligned", "absent"],
)
def test_what_decides_the_compiled_kernel(kernel: Kernel, other: tuple[Any, ...], times: int) -> None:
    bound = launch.Bound(kernel, BLOCK=64)
    bound((1,), torch.zeros(8), 5, 8)
    bound((1,), *other)
    assert len(kernel.compiled) == times


def test_further_constants_make_a_variant_once(kernel: Kernel) -> None:
    bound = launch.Bound(kernel, num_warps=4)
    assert bound.but(BLOCK=32) is bound.but(BLOCK=32) is not bound.but(BLOCK=64)


def test_constants_come_last(kernel: Kernel) -> None:
    kernel.params = (Param("BLOCK", is_constexpr=True), Param("x"))
    with pytest.raises(TypeError, match="runtime arguments must come before"):
        launch.Bound(kernel, BLOCK=1)
