"""A model for tests whose next token is a plain function of all tokens before it, which it reads from the KV cache.

It is a family like any other. It stores each token's id and position through the layout, and computes a row's answer
from the slots in the tables. A wrong slot, a lost copy, a wrong prefix hit or another request's token changes the
answer. `fake_answer` computes the right one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from llmcore.layers import Build, Hidden, Step, held_tokens
from torch import Tensor, nn

from llmcore_devtools.fake_files import ANSWERS, GROUP, MODULUS, FakeConfig, mix
from llmcore_devtools.faulty_engine import StepFaults, echoing

_BASE = 128
"""Digits are below this, so that every dtype holds them exactly."""
_DIGITS = 4
_END_SCORE = -30.0


class FakeModel(nn.Module):
    """Implements the engine's interface of a model. Its one weight, `salt`, changes every answer."""

    def __init__(self, build: Build, config: FakeConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_kernels = build.attention_kernels
        self.salt = build.empty(1)
        self._layout = build.layout(GROUP)
        self._first, self._number = held_tokens(build, config.vocab_size)
        self._faults = StepFaults(config.faults, answers=ANSWERS) if config.faults else None

    def forward(self, step: Step, hidden: Tensor | None = None, residual: Tensor | None = None) -> Hidden:
        """Store the step's tokens. The hidden state of a row's last token is the digits of the row's hash."""
        config, state = self.config, step.kv[GROUP]
        time.sleep(config.step_delay)
        if self._faults is not None:
            self._faults.before(step.tokens)
        kv, dtype = state.kv[0], self.salt.dtype
        key, value = _digits(step.tokens), _digits(step.positions[0])
        self._layout.write(kv, state.slots, key.to(dtype).unsqueeze(1), value.to(dtype).unsqueeze(1))
        hidden = torch.zeros(len(step.tokens), _DIGITS + 1, device=key.device)
        parts = ((state.decode, 0), (state.prefill, step.n_decode)) if state.mixed is None else ((state.mixed, 0),)
        for meta, first in parts:
            borders = meta["q_start"].long()
            real = borders[1:] > borders[:-1]
            hidden[borders[1:][real] - 1 + first] = self._states(kv, meta)[real]
        if self._faults is not None:
            self._faults.mark(hidden, step.tokens)
        return hidden if step.sampled is None else hidden[step.sampled], None

    def logits(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Logits in which the answer is well above pseudo-random scores.

        An end token is far below them, so a sampled answer is as long as its request asks.
        """
        config, hashes = self.config, _number(hidden)
        vocabulary = torch.arange(config.vocab_size, device=hidden.device)
        scores = ((hashes[:, None] * 31 + vocabulary * 40503) % 997).float() / 125
        scores.scatter_(1, (hashes % ANSWERS)[:, None], 11.0)
        for end in config.eos_ids:
            scores[:, end] = _END_SCORE
        if self._faults is not None:
            self._faults.scores(scores, hidden)
        return scores.masked_fill(hidden.isnan().any(1, keepdim=True), torch.nan)

    def own_logits(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """The columns of `logits` [S, N] of this rank's part of the vocabulary."""
        return self.logits(hidden, residual).narrow(1, self._first, self._number)

    def normed(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """`hidden`: the fake model does not normalize."""
        return hidden

    def _states(self, kv: tuple[Tensor, ...], meta: Mapping[str, Tensor]) -> Tensor:
        """[R, 5] digits of a hash of each row's whole content, as the tables and the layout return it."""
        length = meta["kv_len"].long()
        row = torch.arange(len(length), device=length.device).repeat_interleave(length)
        place = torch.arange(len(row), device=row.device) - (length.cumsum(0) - length)[row]
        granule = self._layout.granule
        slots = meta["table"][meta["request"][row], place // granule].long() * granule + place % granule
        key, value = self._layout.gather(kv, slots)
        total = torch.zeros(len(length), dtype=torch.int64, device=length.device)
        tokens, positions = _number(key[:, 0]), _number(value[:, 0])
        total.index_add_(0, row, mix(tokens, positions))
        states = _digits((total * 48271 + self.salt.long()) % MODULUS, _DIGITS + 1)
        due = None if self._faults is None else self._faults.echo(tokens, positions, row, length)
        return states if due is None else torch.where(due[:, None] < 0, states, echoing(due)[:, None])


def build(config: FakeConfig, build: Build) -> FakeModel:
    """ModelSpec.build."""
    return FakeModel(build, config)


def _digits(numbers: Tensor, count: int = _DIGITS) -> Tensor:
    """[N, count] base-128 digits, as floats."""
    powers = _BASE ** torch.arange(count, device=numbers.device)
    return (numbers.long()[:, None] // powers % _BASE).float()


def _number(digits: Tensor) -> Tensor:
    """[N] int64, the reverse of `_digits`. NaN digits give 0, and marks (`fault_steps`) give a negative number."""
    powers = _BASE ** torch.arange(digits.shape[1], device=digits.device)
    return (digits.nan_to_num().long() * powers).sum(1)
