"""The supervisor: the parent of a server's engine and HTTP workers. Imports neither of them, nor torch."""

from llmcore.supervisor.supervisor import Notices, serve

__all__ = ["Notices", "serve"]
