"""What becomes of a request that is not accepted."""

from __future__ import annotations

import time

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
