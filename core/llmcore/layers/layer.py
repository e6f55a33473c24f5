"""Layer: the base of all layers, a torch Module with less host time per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import nn


class Layer(nn.Module):
    """A Module with plain attribute access and plain calls.

    torch finds submodules and parameters in `__getattr__`, which Python tries last, and checks ten kinds of hooks in
    each call. A step has hundreds of both. A Layer also stores its parts as attributes, and its call goes straight to
    `forward`, unless this module has forward hooks itself. It does not call torch's global hooks.
    """

    def __call__(self, *arguments: Any) -> Any:
        """Call `forward`, with the forward hooks that are registered on this module."""
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*arguments)
        return self.forward(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._show(name)

    def __delattr__(self, name: str) -> None:
        if name in self._modules or name in self._parameters:
            self.__dict__.pop(name, None)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See torch.nn.Module."""
        super().register_parameter(name, param)
        self._show(name)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in self._parameters:
            self._show(name)
        return self

    def _show(self, name: str) -> None:
        for parts in (self._modules, self._parameters):
            if name in parts:
                self.__dict__[name] = parts[name]
