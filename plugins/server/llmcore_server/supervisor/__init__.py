"""The supervisor: the parent of a server's engine and HTTP workers. Imports neither of them, nor torch."""

from llmcore.supervisor.mail import Notices
from llmcore.supervisor.status import Pace
from llmcore.supervisor.supervisor import serve

__all__ = ["Notices", "Pace", "serve"]
