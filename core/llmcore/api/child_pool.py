"""Child processes that answer questions within limits, for plugins that run programs of clients."""

from llmcore.child_pool import ChildEnded, ChildPool, Limits, NoChild, serve

__all__ = ["ChildEnded", "ChildPool", "Limits", "NoChild", "serve"]
