"""Events of requests that are not accepted, or not with all that they ask for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llmcore.bridge import Finish, StepEvents, Submit
from llmcore.errors import RequestError


def refusal(request: Submit, error: RequestError) -> StepEvents:
    """The events that end every choice of a request that was not accepted."""
    choices = list(range(max(request.n, 1)))
    return StepEvents(
        stamp=time.monotonic(),
        request=[request.id] * len(choices),
        choice=choices,
        count=[0] * len(choices),
        tokens=[],
        finish=[Finish.ERROR] * len(choices),
        error={row: (error.code or "invalid_value", error.message) for row in choices},
    )


def notice(request: Submit, unenforced: Sequence[str]) -> StepEvents:
    """The event that says what of a request that is accepted its processors do not enforce."""
    return StepEvents(
        stamp=time.monotonic(),
        request=[request.id],
        choice=[0],
        count=[0],
        tokens=[],
        finish=[Finish.RUNNING],
        unenforced={0: list(unenforced)},
    )
