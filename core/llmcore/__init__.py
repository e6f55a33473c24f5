"""llmcore: serve large language models; everything that varies is a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcore.engine.llm import LLM

__version__ = "0.2.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> object:
    # `from llmcore import LLM` works, yet `import llmcore` stays free of torch for the CLI.
    if name == "LLM":
        from llmcore.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'llmcore' has no attribute {name!r}")
