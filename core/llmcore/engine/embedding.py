"""What a request for a hidden state may ask for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcore.bridge import ModelFacts, SamplingParams, Submit
from llmcore.errors import RequestError

POOLINGS = ("last", "mean")
"""Of which of a prompt's tokens a hidden state may be: `Submit.pool`."""


def normalized(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """`state` with length 1; one of zeros stays as it is."""
    length = float(np.linalg.norm(state))
    return state / np.float32(length) if length else state


def check_pool(request: Submit, facts: ModelFacts) -> None:
    """Raise RequestError for a hidden state that this model does not have, or that comes with something else."""
    if not request.pool:
        return
    if request.pool not in POOLINGS:
        raise RequestError(f"pooling is one of {', '.join(POOLINGS)}, not {request.pool!r}", code="invalid_value")
    if not facts.embedding_size:
        raise RequestError(
            f"this model ({facts.architecture}) does not show its hidden states", code="unsupported_parameter"
        )
    alone = (request.n, request.max_new_tokens, request.prompt_logprobs, request.beams) == (1, 1, False, None)
    plain = SamplingParams(temperature=0.0, seed=request.sampling.seed)
    if not alone or request.sampling != plain:
        raise RequestError("a hidden state is one greedy token and nothing else", code="invalid_value")
