"""What a connection needs of its server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from llmcore_server.http.bodies import Pool
from llmcore_server.http.entry import Entry
from llmcore_server.http.errors import EncodeError
from llmcore_server.http.send_batch import SendBatch
from llmcore_server.http.streaming.limits import Limits
from llmcore_server.http.streaming.loop import Loop
from llmcore_server.http.strict import Head

if TYPE_CHECKING:
    from llmcore_server.http.streaming.channel import StreamChannel


class Owner(Protocol):
    """The server."""

    limits: Limits
    pool: Pool
    loop: Loop
    send_batch: SendBatch
    encoder: Callable[[str], EncodeError]
    """How the dialect of a path writes errors."""

    def judge(self, head: Head) -> Entry:
        """Admit or refuse a request by its head."""

    def forget(self, channel: StreamChannel) -> None:
        """`channel` is closing."""
