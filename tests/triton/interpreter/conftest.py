"""Triton decides when it decorates a kernel whether to interpret it, so these tests have a process of their own:
`make test-interpreter` sets TRITON_INTERPRET=1; any other run leaves them out.

The interpreter does little arithmetic; its time goes into what it does anew for each operation, although the answer
is always the same. `quicken` makes it remember. No kernel sees a difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def quicken() -> None:
    """Takes repeated work out of Triton's interpreter, for the whole process."""
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    kernel = SimpleNamespace(__globals__={"tl": tl, "core": core})
    # Each launch replaces all builtins of tl, and so does each call of a jitted function by another, as tl.sum is one.
    interpreter._patch_lang(kernel)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    # Each sum of integers is computed again in 64 bits, for an assertion that only a debugger's build evaluates.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    core.block_type.__init__ = _shared(core.block_type.__init__)
    core.tensor.__init__ = _of_its_type(core.tensor.__init__)


def _by_name(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`convert`, which makes a table of all types for each question."""
    known: dict[str, Any] = {}

    def quick(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = convert(kind)
        return known[kind.name]

    return quick


def _shared(init: Callable[..., None]) -> Callable[..., None]:
    """`init` of the types of blocks, which nothing changes once they are made: equal ones share their attributes."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def quick(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key in known:
            self.__dict__ = known[key]
        else:
            init(self, element_ty, shape)
            known[key] = self.__dict__

    return quick


def _of_its_type(init: Callable[..., None]) -> Callable[..., None]:
    """`init` of tensors: all attributes but the handle follow from the type, which keeps them."""

    def quick(self: Any, handle: Any, type: Any) -> None:
        if "of_tensors" not in type.__dict__:
            init(self, None, type)
            type.of_tensors = self.__dict__.copy()
        self.__dict__.update(type.of_tensors)
        self.handle = handle

    return quick


if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
