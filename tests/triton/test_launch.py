"""Launching a kernel: when Triton is asked anew, and when its compiled kernel is launched again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from llmcore_triton import launch
from triton.backends.nvidia.driver import wrap_handle_tensordesc


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
        self.run: InC | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*arguments: Any, **options: Any) -> Compiled:
            self.options = options
            self.compiled.append(Compiled())
            if self.run is not None:
                self.compiled[-1].run = self.run
            return self.compiled[-1]

        return compile_and_launch


class InC:
    """What Triton's launcher calls in the end; notes what with."""

    def __init__(self, tensordescs: list[dict[str, Any]], arguments: int) -> None:
        self.entered: list[tuple[Any, ...]] = []
        self.called: list[tuple[Any, ...]] = []
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.global_scratch_size = self.profile_scratch_size = 0
        signature = {i: "tensordesc<bf16[1]>" if i < len(tensordescs) else "*bf16" for i in range(arguments)}
        self.launch = wrap_handle_tensordesc(lambda *arguments: self.entered.append(arguments), signature, tensordescs)

    def __call__(self, *arguments: Any) -> None:
        self.called.append(arguments)


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


HEAD = ("function", False, True, None, None, "metadata", None, None, None)


def test_the_launcher_that_is_known_is_entered_with_addresses(kernel: Kernel) -> None:
    bound, kernel.run = launch.Bound(kernel, BLOCK=64), InC([], 4)
    x, y = torch.zeros(8), torch.ones(8)
    bound((3,), x, 5, 8)
    bound((2, 4), y, 6, 8)
    assert kernel.run.entered == [(2, 4, 1, 77, *HEAD, y.data_ptr(), 6, 8, 64)]


def test_apart_no_kernel_overlaps(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "APART", True)
    bound, kernel.run = launch.Bound(kernel, BLOCK=64), InC([], 4)
    for _ in range(2):
        bound((1,), torch.zeros(8), 5, 8)
    (entered,) = kernel.run.entered
    assert entered[4:7] == ("function", False, False)


@pytest.mark.parametrize("change", ["version", "scratch"])
def test_any_other_launcher_is_called_as_triton_does(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    bound, kernel.run = launch.Bound(kernel, BLOCK=64), InC([], 4)
    if change == "version":
        monkeypatch.setattr(triton, "__version__", "99.0")
    else:
        kernel.run.global_scratch_size = 16
    x = torch.zeros(8)
    for _ in range(2):
        bound((3,), x, 5, 8)
    (called,) = kernel.run.called
    assert called[:9] == (3, 1, 1, 77, "function", "metadata", None, None, None)
    assert called[9] is x and called[10:] == (5, 8, 64)


def test_a_descriptor_that_is_kept_is_encoded_once(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "make_tensordesc_arg", lambda box, how: made.append((box, how)) or ["map", len(made)])
    bound, kernel.run = launch.Bound(kernel, BLOCK=64), InC([{"swizzle": 3}], 4)
    weight, x = torch.zeros(8, 8), torch.zeros(8, 8)
    kept = launch.Box(weight, [8, 8], [8, 1], [8, 8])
    for box in (kept, kept, kept, launch.Box(x, [8, 8], [8, 1], [8, 8])):
        bound((1,), box, 5, 8)
    assert [(box.base is weight, how) for box, how in made] == [(True, {"swizzle": 3}), (False, {"swizzle": 3})]
    assert [seen[4 + len(HEAD) :] for seen in kernel.run.entered] == [("map", n, 5, 8, 64) for n in (1, 1, 2)]
