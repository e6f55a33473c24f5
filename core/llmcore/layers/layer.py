"""Layer: torch's Module as every layer here is one, without what Module costs the host in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import nn


class Layer(nn.Module):
    """A Module whose parts are found, and which is called, as those of any object.

    Module keeps submodules and parameters where Python looks only after everything else has failed, and its call
    asks for hooks of ten kinds; a step of a prompt's chunk is some hundred of each. Here parts are attributes too,
    and a call goes to `forward` unless this very module has forward hooks. Hooks on all modules are not called.
    """

    def __call__(self, *arguments: Any) -> Any:
        """`forward`, with the hooks that are registered on it."""
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
