"""A device without a model: what a step would read and write, as numbers that tell whose they are.

The KV of a position is a number that stands for all tokens up to it, and the next token follows from it alone. So
whatever a request reads that is not its own is noticed at once, and its answer can be known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llmcore.kv.group import KVGroup
from llmcore.protocols import Int32, Int64
from llmcore.sched.plan import StepPlan, StepResult
from numpy.typing import NDArray

BAD = -1
"""KV that is not finite; whoever reads it computes nothing finite."""

START = 1
MODULUS = (1 << 61) - 1


def extend(state: int, token: int) -> int:
    """The number that stands for a sequence, after one more token."""
    return (state * 1_000_003 + token + 7) % MODULUS


def next_token(state: int, choice: int, vocab: int) -> int:
    """The token that follows a sequence."""
    return ((state ^ (choice + 1) * 0x9E3779B97F4A7C15) % MODULUS) % vocab


def answer(prompt: Sequence[int], choice: int, n_tokens: int, vocab: int) -> list[int]:
    """The first `n_tokens` tokens that follow `prompt`."""
    state = START
    for token in prompt:
        state = extend(state, token)
    tokens: list[int] = []
    for _ in range(n_tokens):
        tokens.append(next_token(state, choice, vocab))
        state = extend(state, tokens[-1])
    return tokens


def logprobs(state: int, vocab: int) -> NDArray[np.float32]:
    """[vocab] what beam searches are told of the tokens that may follow a sequence."""
    mixed = [(extend(state, token) * 0x9E3779B97F4A7C15) % MODULUS for token in range(vocab)]
    return np.array([-(number % 65_521) / 8192 - 0.01 for number in mixed], np.float32)


class SimulatedDevice:
    """Tables, histories and KV as a runner keeps them, told apart from the scheduler's own.

    `bad`: (plan, row) -> whether the row's logits, and the KV it writes, are not finite.
    """

    def __init__(self, groups: Sequence[KVGroup], *, vocab: int, bad: Callable[[StepPlan, int], bool]) -> None:
        self._groups = groups
        self._vocab = vocab
        self._bad = bad
        self._kv: list[Int64] = [np.zeros((group.pool.total, group.granule), np.int64) for group in groups]
        self._tables: list[Int32] = [np.full(group.table.shape, -1, np.int32) for group in groups]
        self._tokens: dict[int, list[int]] = {}
        self._states: dict[int, list[int]] = {}
        self._choice: dict[int, int] = {}
        self._asked: dict[int, int] = {}

    def run(self, plan: StepPlan, *, broken: bool = False) -> StepResult:
        """Execute a plan; a `broken` one leaves KV that nobody may use. AssertionError where the plan is wrong."""
        self._prepare(plan)
        self._check_rows(plan)
        finite = {}
        for row in range(plan.request.size):
            finite[row] = self._run_row(plan, row, broken=broken)
        top_ids, top_logprobs = self._best(plan)
        tokens = [self._sample(int(index)) for index in plan.sample_request]
        return StepResult(
            tokens=np.array(tokens, np.int32),
            finite=np.array([finite[int(row)] for row in plan.sample_row], np.bool_),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def _best(self, plan: StepPlan) -> tuple[Int32 | None, NDArray[np.float32] | None]:
        """The best next tokens [S, k] and their log-probabilities, where any request asked."""
        most = max((self._asked[int(index)] for index in plan.sample_request), default=0)
        if not most:
            return None, None
        every = [logprobs(self._states[int(index)][-1], self._vocab) for index in plan.sample_request]
        order = [np.argsort(-one, kind="stable")[:most] for one in every]
        return np.array(order, np.int32), np.array([one[at] for one, at in zip(every, order, strict=True)])

    def _prepare(self, plan: StepPlan) -> None:
        for table, writes in zip(self._tables, plan.writes, strict=True):
            places = set(zip(writes.index.tolist(), writes.at.tolist(), strict=True))
            assert len(places) == writes.index.size, "a place of the table is written twice in one step"
            table[writes.index, writes.at] = writes.granule
        for kv, pairs in zip(self._kv, plan.copies, strict=True):
            for src, dst in pairs:
                kv[dst] = kv[src]
        for new in plan.admitted:
            self._tokens[new.index] = new.tokens.tolist()
            self._choice[new.index] = new.choice
            self._asked[new.index] = new.sampling.logprobs or 0
            states = [START]
            for token in self._tokens[new.index]:
                states.append(extend(states[-1], token))
            self._states[new.index] = states

    def _check_rows(self, plan: StepPlan) -> None:
        assert np.unique(plan.request).size == plan.request.size, "a request has two rows in one step"
        assert (plan.n_query >= 1).all(), "a row without tokens"
        assert (plan.n_query[: plan.n_decode] == 1).all(), "a decode row with more than one token"
        assert (np.diff(plan.n_query[plan.n_decode :]) >= 0).all(), "chunks are not in order of their size"
        for group, table in zip(self._groups, self._tables, strict=True):
            written: set[int] = set()
            for request, n_query, start in zip(plan.request, plan.n_query, plan.start, strict=True):
                at = np.arange(start // group.granule, -(-(start + n_query) // group.granule))
                granules = table[request, at]
                assert (granules >= 0).all(), "a row has no slots for what it computes"
                assert np.array_equal(granules, group.table[request, at]), "the device's table is not the host's"
                assert not written & set(granules.tolist()), "two rows write one granule"
                written |= set(granules.tolist())
                forks = sum(new.fork_of == request for new in plan.admitted)
                assert (group.pool.holders[granules] <= 1 + forks).all(), "a row writes what others hold"

    def _run_row(self, plan: StepPlan, row: int, *, broken: bool) -> bool:
        index, start, n_query = int(plan.request[row]), int(plan.start[row]), int(plan.n_query[row])
        states = self._states[index]
        end = start + n_query
        assert end <= len(self._tokens[index]), "a row computes tokens that do not exist yet"
        mine = np.array(states[1 : end + 1], np.int64)
        finite = not self._bad(plan, row)
        for group, table, kv in zip(self._groups, self._tables, self._kv, strict=True):
            at = np.arange(end)
            slots = (table[index, at // group.granule], at % group.granule)
            read = kv[slots][:start]
            assert ((read == mine[:start]) | (read == BAD)).all(), f"row {row} reads KV that is not its own"
            finite &= not (read == BAD).any()
            kv[slots[0][start:], slots[1][start:]] = mine[start:] if finite and not broken else BAD
        return finite

    def _sample(self, index: int) -> int:
        token = next_token(self._states[index][-1], self._choice[index], self._vocab)
        self._tokens[index].append(token)
        self._states[index].append(extend(self._states[index][-1], token))
        return token
