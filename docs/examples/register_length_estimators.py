"""A length estimator: it predicts the mean length of the answers that have finished."""

import numpy as np
from llmcore.api import LengthEstimatorSpec, hookimpl


@hookimpl
def register_length_estimators():
    yield LengthEstimatorSpec(name="mean", make=f"{__name__}:Mean")


class Mean:
    """api.sched.LengthEstimator."""

    guaranteed = False

    def __init__(self, limits):
        self.finished = 0
        self.tokens = 0

    def totals(self, produced, max_new, ignore_eos, used):
        mean = self.tokens // self.finished if self.finished else max_new
        guess = np.where(ignore_eos, max_new, mean)
        return np.minimum(np.maximum(guess, produced + 1), max_new).astype(np.int32)

    def observe(self, produced):
        self.finished += 1
        self.tokens += produced
