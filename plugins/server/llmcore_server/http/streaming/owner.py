"""What a connection needs of its server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from llmcore.http.bodies import Pool
from llmcore.http.entry import Entry
from llmcore.http.errors import EncodeError
from llmcore.http.outbox import Outbox
from llmcore.http.streaming.limits import Limits
from llmcore.http.streaming.loop import Loop
from llmcore.http.strict import Head

if TYPE_CHECKING:
    from llmcore.http.streaming.channel import StreamChannel


class Owner(Protocol):
    """The server."""

    limits: Limits
    pool: Pool
    loop: Loop
    outbox: Outbox
    encoder: Callable[[str], EncodeError]
    """How the dialect of a path writes errors."""

    def judge(self, head: Head) -> Entry:
        """Admit or refuse a request by its head."""

    def forget(self, channel: StreamChannel) -> None:
        """`channel` is closing."""
