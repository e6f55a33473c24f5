"""The supervisor: the parent of a server's engine and HTTP workers. Imports neither of them, nor torch."""

from llmcore_server.supervisor.group import Grouping, Patience
from llmcore_server.supervisor.mail import Notices
from llmcore_server.supervisor.status import Pace
from llmcore_server.supervisor.supervisor import serve

__all__ = ["Grouping", "Notices", "Pace", "Patience", "serve"]
