"""A device without a model: what a step would read and write, as numbers that tell whose they are.

The KV of a position is a number that stands for all tokens up to it, and the next token follows from it alone. So
whatever a request reads that is not its own is noticed at once, and its answer can be known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llmcore.api.bridge import Submit
from llmcore.api.protocols import Int32, Int64
from llmcore.kv.space import KVGroup
from llmcore.sched.plan import StepPlan, StepResult
from llmcore.sched.request import Lease
from numpy.typing import NDArray

BAD = -1
"""KV that is not finite. A row that reads it computes nothing finite."""

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


@dataclass
class _Known:
    """A request on the device."""

    tokens: list[int]
    states: list[int]
    """The numbers of all prefixes of `tokens`, the empty one included."""
    computed: int
    """Tokens that have KV."""
    choice: int
    asked: int
    """The best tokens to report in the place of each."""

    def append(self, token: int) -> None:
        """One more token."""
        self.tokens.append(token)
        self.states.append(extend(self.states[-1], token))


class SimulatedDevice:
    """Tables, histories and KV as a runner keeps them, told apart from the scheduler's own.

    `bad`: (request index, first position, position behind the last) -> whether the logits of a row that computes
    these, and the KV it writes, are not finite. `drafter`: (tokens to draft) -> the number of right ones, or -1
    if the whole row gives nothing. Without a drafter each sample is one token.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        vocab: int,
        bad: Callable[[int, int, int], bool],
        drafter: Callable[[int], int] | None = None,
    ) -> None:
        self._groups = groups
        self._vocab = vocab
        self._bad = bad
        self._drafter = drafter
        self._kv: list[Int64] = [np.zeros((group.pool.total, group.granule), np.int64) for group in groups]
        self._tables: list[Int32] = [np.full(group.table.shape, -1, np.int32) for group in groups]
        self._requests: dict[int, _Known] = {}

    def run(self, plan: StepPlan, *, broken: bool = False) -> StepResult:
        """Execute a plan; a `broken` one leaves KV that must not be used. AssertionError where the plan is wrong."""
        self._prepare(plan)
        self._check_rows(plan)
        sampled = set(plan.sample_row.tolist())
        finite, given = {}, {}
        for row, index in enumerate(plan.request.tolist()):
            request, n_query = self._requests[index], int(plan.n_query[row])
            decodes = row < plan.n_decode
            drafts = decodes and not request.asked and self._drafter is not None
            right = self._drafter(n_query - 1) if drafts and self._drafter is not None else n_query - 1
            fed = self._fed(request, n_query, right) if decodes else request.tokens[request.computed :][:n_query]
            finite[row] = self._compute(plan, row, fed, broken=broken)
            if row in sampled:
                given[row] = right + 1 if decodes else 1
            request.computed += given[row] if decodes else n_query
        requests = [self._requests[index] for index in plan.sample_request.tolist()]
        counts = [given[row] for row in plan.sample_row.tolist()]
        states = [self._sample(request, count) for request, count in zip(requests, counts, strict=True)]
        drawn = [request.tokens[len(request.tokens) - n :] for request, n in zip(requests, counts, strict=True)]
        top_ids, top_logprobs = self._best(states, max((request.asked for request in requests), default=0))
        return StepResult(
            tokens=np.array([token for some in drawn for token in some], np.int32),
            finite=np.array([finite[row] for row in plan.sample_row.tolist()], np.bool_),
            counts=None if self._drafter is None else np.array(counts, np.int32),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def _best(self, states: Sequence[Sequence[int]], most: int) -> tuple[Int32 | None, NDArray[np.float32] | None]:
        """The `most` best tokens after each state, and their log-probabilities; None without a request for them."""
        if not most:
            return None, None
        every = [logprobs(state, self._vocab) for some in states for state in some]
        order = [np.argsort(-one, kind="stable")[:most] for one in every]
        return np.array(order, np.int32), np.array([one[at] for one, at in zip(every, order, strict=True)])

    def write(self, lease: Lease, known: Sequence[int], start: int, end: int) -> None:
        """In place of a row: the KV of `known` from token `start` to `end`, into the slots of `lease`."""
        state = START
        for at, token in enumerate(known[:end]):
            state = extend(state, token)
            for group, kv, granules in zip(self._groups, self._kv, lease.granules, strict=True):
                granule = granules[at // group.granule - lease.start // group.granule] if at >= start else -1
                assert granule < 0 or group.pool.holders[granule] == 1, "a source writes what others hold"
                if granule >= 0:
                    kv[granule, at % group.granule] = state

    def _prepare(self, plan: StepPlan) -> None:
        for table, writes in zip(self._tables, plan.writes, strict=True):
            places = set(zip(writes.index.tolist(), writes.at.tolist(), strict=True))
            assert len(places) == writes.index.size, "a place of the table is written twice in one step"
            table[writes.index, writes.at] = writes.granule
        for kv, pairs in zip(self._kv, plan.copies, strict=True):
            for src, dst in pairs:
                kv[dst] = kv[src]
        for new in plan.admitted:
            request = self._requests[new.index] = _Known(
                [], [START], new.start, new.choice, new.sampling.logprobs or 0
            )
            for token in new.tokens.tolist():
                request.append(token)

    def _check_rows(self, plan: StepPlan) -> None:
        assert np.unique(plan.request).size == plan.request.size, "a request has two rows in one step"
        assert (plan.n_query >= 1).all(), "a row without tokens"
        assert (np.diff(plan.n_query[: plan.n_decode]) >= 0).all(), "decode rows are not in order of their size"
        assert (np.diff(plan.n_query[plan.n_decode :]) >= 0).all(), "chunks are not in order of their size"
        starts = [self._requests[index].computed for index in plan.request.tolist()]
        ends = plan.start + plan.n_query
        for row, start in enumerate(starts):
            exact = row >= plan.n_decode or self._drafter is None
            assert start == plan.start[row] if exact else start <= plan.start[row], "a row begins somewhere else"
            assert ends[row] - plan.reserve[row] <= start, "a row begins before the slots that it holds"
        for group, table in zip(self._groups, self._tables, strict=True):
            written: set[int] = set()
            for request, start, end in zip(plan.request.tolist(), starts, ends.tolist(), strict=True):
                at = np.arange(start // group.granule, -(-end // group.granule))
                granules = table[request, at]
                assert end <= group.held[request] * group.granule, "a row holds fewer slots than it may need"
                assert (granules >= 0).all(), "a row has no slots for what it computes"
                assert np.array_equal(granules, group.table[request, at]), "the device's table is not the host's"
                assert not written & set(granules.tolist()), "two rows write one granule"
                written |= set(granules.tolist())
                forks = sum(new.fork_of == request for new in plan.admitted)
                assert (group.pool.holders[granules] <= 1 + forks).all(), "a row writes what others hold"

    def _fed(self, request: _Known, n_query: int, right: int) -> list[int]:
        """The last token of a row that decodes, and its drafts: `right` right ones, then wrong ones."""
        assert request.computed == len(request.tokens) - 1, "a row that decodes does not begin with its last token"
        fed, state = [request.tokens[-1]], request.states[-1]
        for at in range(n_query - 1):
            token = (next_token(state, request.choice, self._vocab) + (at >= right)) % self._vocab
            state = extend(state, token)
            fed.append(token)
        return fed

    def _compute(self, plan: StepPlan, row: int, fed: Sequence[int], *, broken: bool) -> bool:
        """Write the KV of the tokens `fed`; whether that, and what was read for it, is finite."""
        index = int(plan.request[row])
        request = self._requests[index]
        start, end = request.computed, request.computed + len(fed)
        assert end <= len(request.tokens) or row < plan.n_decode, "a row computes tokens that do not exist yet"
        states = request.states[: start + 1]
        for token in fed:
            states.append(extend(states[-1], token))
        mine = np.array(states[1:], np.int64)
        finite = not self._bad(index, start, end)
        for group, table, kv in zip(self._groups, self._tables, self._kv, strict=True):
            at = np.arange(end)
            slots = (table[index, at // group.granule], at % group.granule)
            read = kv[slots][:start]
            assert ((read == mine[:start]) | (read == BAD)).all(), f"row {row} reads KV that is not its own"
            finite &= not (read == BAD).any()
            kv[slots[0][start:], slots[1][start:]] = mine[start:] if finite and not broken else BAD
        return finite

    def _sample(self, request: _Known, count: int) -> list[int]:
        """Give a request its next `count` tokens; the numbers of what stood before each."""
        for _ in range(count):
            request.append(next_token(request.states[-1], request.choice, self._vocab))
        return request.states[-count - 1 : -1]


Found = tuple[np.float32, list[int]]
"""(score, tokens of the beam)."""


def searched(prompt: Sequence[int], submit: Submit, vocab: int) -> list[list[int]]:
    """The `n` best answers to `prompt`, best first."""
    search = submit.beams
    assert search is not None
    root = START
    for token in prompt:
        root = extend(root, token)
    stops, width = set(submit.stop_ids), search.width
    running: list[Found] = [(np.float32(0), [])]
    ended: list[Found] = []
    for length in range(1, submit.max_new_tokens + 1):
        best = sorted(_continued(running, root, vocab), key=lambda found: -found[0])
        best = [found for found in best if length > submit.min_new_tokens or found[1][-1] not in stops]
        best = best[: max(2, 1 + len(submit.stop_ids)) * width]
        done = [found[1][-1] in stops or length == submit.max_new_tokens for found in best]
        penalty = np.float32(float(length) ** search.length_penalty)
        ended += [(score / penalty, tokens) for (score, tokens), over in zip(best[:width], done, strict=False) if over]
        ended = sorted(ended, key=lambda found: -found[0])[:width]
        running = [found for found, over in zip(best, done, strict=True) if not over][:width]
        if len(ended) == width:
            most = submit.max_new_tokens if search.early_stopping is None and search.length_penalty > 0 else length
            hope = running and running[0][0] / np.float32(float(most) ** search.length_penalty) > ended[-1][0]
            if search.early_stopping or not hope:
                break
    return [tokens for _, tokens in ended[: submit.n]]


def _continued(running: Sequence[Found], root: int, vocab: int) -> list[Found]:
    found: list[Found] = []
    for score, tokens in running:
        state = root
        for token in tokens:
            state = extend(state, token)
        found += [(score + logprob, [*tokens, token]) for token, logprob in enumerate(logprobs(state, vocab))]
    return found
