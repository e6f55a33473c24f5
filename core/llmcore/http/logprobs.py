"""Log-probabilities as JSON can hold them."""

LOWEST = -9999.0
"""What stands for minus infinity, which JSON does not have."""


def clamped(logprob: float) -> float:
    """`logprob`, or the lowest number that an answer shows."""
    return logprob if logprob > LOWEST else LOWEST
