"""KV capacity: the future peak of what runs, what one more choice would make of it, and what can be served at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmcore.api.bridge import Submit
from llmcore.api.errors import ConfigError, RequestError
from llmcore.api.protocols import Int32, Int64, SchedulerLimits
from llmcore.kv.space import Hit, KVGroup, KVSpace
from llmcore.sched.request import NO_TOKEN, Choice, State

TILE = 128
"""Tokens of a step that matrix products of a GPU compute together. One token above a multiple costs a whole tile."""


@dataclass(frozen=True)
class FuturePeak:
    """Requests by how long they will still run, the longest first: columns over requests, all counts in slots.

    `own[i]` is what request i alone holds now, `growth[i]` what it will add until it ends, one slot a step.
    `shared` is what several hold together; it may live as long as any of them. When the k-th ends, exactly the
    k longest are there and each has grown by the k-th's growth, so the peak is the maximum over k of
    shared + sum(own[:k]) + k * growth[k - 1]. `row[i]` tells requests apart.
    """

    row: Int32
    own: Int32
    growth: Int32
    shared: int

    @staticmethod
    def of(row: Int32, own: Int32, growth: Int32, shared: int) -> FuturePeak:
        """The same from columns in any order."""
        order = np.argsort(-growth, kind="stable")
        return FuturePeak(row[order], own[order], growth[order], shared)

    @property
    def peak(self) -> int:
        """The maximum; `shared` where nothing runs."""
        if not self.own.size:
            return self.shared
        count: Int64 = np.arange(1, self.own.size + 1)
        return self.shared + int((np.cumsum(self.own, dtype=np.int64) + count * self.growth).max())

    def share(self, owners: Int32) -> FuturePeak:
        """One slot of each of `owners` (a row per slot) becomes shared."""
        if not owners.size:
            return self
        given = np.bincount(owners, minlength=int(self.row.max(initial=-1)) + 1)[self.row]
        return FuturePeak(self.row, (self.own - given).astype(np.int32), self.growth, self.shared + owners.size)

    def hold(self, slots: int) -> FuturePeak:
        """With `slots` more that are held all the time."""
        return FuturePeak(self.row, self.own, self.growth, self.shared + slots)

    def add(self, row: Int32, own: Int32, growth: int) -> FuturePeak:
        """With more requests that all grow alike (the choices of one)."""
        at = int(np.searchsorted(-self.growth, -growth, side="right"))
        return FuturePeak(
            np.concatenate([self.row[:at], row, self.row[at:]]),
            np.concatenate([self.own[:at], own, self.own[at:]]),
            np.concatenate([self.growth[:at], np.full(row.size, growth, np.int32), self.growth[at:]]),
            self.shared,
        )


class Capacity:
    """Sees ahead from one moment: `fits` adds a request to what runs if the peak allows it in every group.

    A request holds the slots of its prompt at once (they will be needed), then one more a step from the end of its
    prompt on, and gives them back `ahead` steps after its last one. A request that loads its KV may begin at any time,
    so all slots that it will ever need count from now on.
    """

    def __init__(self, state: State, *, ask: bool = True) -> None:
        """`ask`: ask the estimator about all that runs; otherwise its last answers are used."""
        table = state.table
        self._state = state
        self._used = max(group.pool.live / group.pool.total for group in state.space.groups)
        rows = table.running()
        produced, max_new = table.length[rows] - table.prompt_len[rows], table.max_new[rows]
        if ask and rows.size:
            table.foresee(rows, self._totals(produced, max_new, table.stops[rows, 0] == NO_TOKEN))
        steps = np.ones(rows.size, np.int32)
        prompts = np.flatnonzero(table.computed[rows] < table.prefill[rows])
        steps[prompts] = self._prompt_steps((table.length[rows] - table.computed[rows])[prompts])
        self._queue_steps = int(steps[prompts].max(initial=0))
        foreseen = np.maximum(table.foreseen[rows], np.minimum(produced + 1, max_new))
        # A length that is an upper bound counts as held, and the request may yet grow from the tokens that are known.
        length = table.known[rows] if state.drafts else table.length[rows]
        growth = np.maximum(steps + table.prompt_len[rows] + foreseen - 1 - length, 0) + state.ahead
        self._peaks = [self._peak_of(group, rows, growth) for group in state.space.groups]

    @property
    def peak(self) -> int:
        """The future peak of the first group, in tokens."""
        return self._peaks[0].peak * self._state.space.groups[0].granule

    def fits(self, choice: Choice, hit: Hit, *, alone: bool) -> bool:
        """True if `choice`, started with `hit`, fits; then it counts from now on, in the rows it will get next.

        `alone`: no other request holds KV. Then it always fits, for `check_submit` has seen that it can be served.
        """
        table, groups, submit = self._state.table, self._state.space.groups, choice.request.submit
        rows = table.peek(choice.places)
        produced, max_new = np.array([[choice.produced.size], [submit.max_new_tokens]], np.int32)
        foreseen = int(self._totals(produced, max_new, np.array([not submit.stop_ids]))[0])
        steps = self._queue_steps + int(self._prompt_steps(np.array([choice.size - hit.tokens], np.int32))[0])
        growth = steps + len(choice.request.prompt) + foreseen - 1 - choice.size + self._state.ahead
        peaks = []
        for group, peak, granules in zip(groups, self._peaks, hit.granules, strict=True):
            if choice.request.given(hit.tokens) > hit.tokens:
                peaks.append(peak.hold(self._final(group, choice, foreseen)))
                continue
            own = np.full(rows.size, int(choice.size % group.granule > 0), np.int32)
            own[0] = group.granules(choice.size - 1) - int(np.count_nonzero(group.pool.in_use(granules)))
            owners = group.sharing.owners(group.sharing.newly_shared(granules))
            peaks.append(peak.share(owners).add(rows, own, group.granules(growth)))
        if not alone and any(peak.peak > group.pool.total for group, peak in zip(groups, peaks, strict=True)):
            return False
        self._peaks = peaks
        self._queue_steps = steps
        table.foresee(rows[:1], foreseen)
        return True

    def holds(self, rows: Int32, more: Int32) -> bool:
        """True if all that runs still fits when `rows` take the slots of `more` tokens each ahead of time."""
        ahead = np.zeros(self._state.table.length.size, np.int32)
        ahead[rows] = more
        return all(
            replace(peak, own=peak.own + group.granules_of(ahead)[peak.row]).peak <= group.pool.total
            for group, peak in zip(self._state.space.groups, self._peaks, strict=True)
        )

    def _totals(self, produced: Int32, max_new: Int32, ignore_eos: NDArray[np.bool_]) -> Int32:
        """The expected lengths of answers that have `produced` tokens."""
        totals = self._state.estimator.totals(produced, max_new, ignore_eos, self._used)
        clipped: Int32 = np.minimum(np.maximum(totals, np.minimum(produced + 1, max_new)), max_new)
        return clipped

    def _prompt_steps(self, tokens: Int32) -> Int32:
        """The most steps until each of several prompts, computed one after the other, is done.

        Chunks share a step with every other running request's decode row; a whole prompt may wait a step.
        """
        limits, granule = self._state.limits, self._state.space.granule
        least = limits.stall_tokens - (TILE // 2 if limits.stall_tokens >= TILE else 0)
        left = min(limits.batch_tokens - (limits.max_running - 1), least or limits.batch_tokens)
        chunk = max(min(limits.chunk_tokens, left) // granule * granule, granule)
        each = -(-tokens // chunk) if limits.chunked else 2 * -(-tokens // limits.batch_tokens)
        steps: Int32 = np.cumsum(each).astype(np.int32)
        return steps

    def _peak_of(self, group: KVGroup, rows: Int32, growth: Int32) -> FuturePeak:
        table, space = self._state.table, self._state.space
        own = group.granules_of(table.length[rows] - 1) - group.sharing.per_row[rows]
        own += space.pending_copies(group, rows, table.computed[rows])
        steps = group.granules_of(growth)
        for i in np.flatnonzero(np.isin(rows, [*table.forking])) if table.forking else ():
            places = table.forking[int(rows[i])]
            own = np.append(own, np.full(len(places), int(table.prompt_len[rows[i]] % group.granule > 0)))
            steps = np.append(steps, np.full(len(places), steps[i]))
            rows = np.append(rows, places)
        peak = FuturePeak.of(rows.astype(np.int32), own.astype(np.int32), steps.astype(np.int32), group.sharing.total)
        for row in table.leases:
            peak = peak.hold(self._final(group, table.choice(row), int(table.foreseen[row])))
        return peak

    def _final(self, group: KVGroup, choice: Choice, foreseen: int) -> int:
        """The granules of a choice and its forks when they end."""
        prompt = len(choice.request.prompt)
        each = group.granules(prompt + foreseen - 1 + self._state.ahead)
        return each + choice.forks * (each - prompt // group.granule)


def _check_produced(submit: Submit) -> None:
    """Raise RequestError if its choices cannot continue."""
    longest = max(map(len, submit.produced.values()))
    wrong = {
        f"an answer of {longest} tokens has all of its {submit.max_new_tokens}; it cannot continue": longest
        >= submit.max_new_tokens,
        f"its choices are 0 to {submit.n - 1}": not submit.produced.keys() <= set(range(submit.n)),
        "a beam search, a score and a hidden state do not continue; they begin again": submit.beams is not None
        or submit.score
        or bool(submit.pool),
        "the prompt's log-probabilities came with the first token of choice 0": submit.prompt_logprobs
        and submit.produced.get(0) != (),
    }
    for why, applies in wrong.items():
        if applies:
            raise RequestError(f"produced: {why}", param="produced", code="invalid_value")


def beside_answers(tokens: int, answers: int) -> int:
    """The tokens of prompts in a step with `answers` rows that decode, if about `tokens` should take part.

    A large step is rounded to whole tiles, so it has at most half a tile more or less.
    """
    return round((tokens + answers) / TILE) * TILE - answers if tokens >= TILE else tokens


def fitting(limits: SchedulerLimits, space: KVSpace) -> SchedulerLimits:
    """`limits` that leave room for a chunk in a step in which all requests decode: fewer of them may run at once, and
    `stall_tokens` is a granule at least.

    Raises ConfigError where chunks cannot be formed.
    """
    granule = space.granule
    if limits.chunk_tokens < granule or limits.batch_tokens < granule:
        raise ConfigError(
            f"a step of {limits.batch_tokens} tokens in chunks of {limits.chunk_tokens} cannot fill a KV granule of "
            f"{granule}; raise --batch_max_tokens and --chunked_prefill_size to at least {granule}"
        )
    if not limits.chunked and limits.batch_tokens < limits.max_input_len:
        raise ConfigError(
            f"without chunked prefill a prompt of {limits.max_input_len} tokens must fit a step of "
            f"{limits.batch_tokens}; raise --batch_max_tokens, lower --max_req_input_len, or drop "
            "--disable_chunked_prefill"
        )
    return replace(
        limits,
        max_running=min(limits.max_running, limits.batch_tokens - granule + 1),
        # Rounded to tiles, a step still has room for a granule.
        stall_tokens=max(limits.stall_tokens, granule + (TILE // 2 if granule > TILE // 2 else 0))
        if limits.stall_tokens
        else 0,
    )


def check_submit(submit: Submit, limits: SchedulerLimits, space: KVSpace, *, guaranteed: bool) -> None:
    """Raise RequestError if the request can never be served."""
    tokens = len(submit.prompt)
    if not tokens:
        raise RequestError("the prompt is empty", param="prompt", code="invalid_value")
    if submit.max_new_tokens < 1:
        raise RequestError("max_new_tokens must be at least 1", param="max_new_tokens", code="invalid_value")
    if not 1 <= submit.n <= limits.max_running:
        raise RequestError(
            f"n must be between 1 and {limits.max_running}, the requests this server runs at once; it is {submit.n}",
            param="n",
            code="invalid_value",
        )
    beams = 1 if submit.beams is None else submit.beams.width
    if submit.beams is not None and not max(2, submit.n) <= beams <= limits.max_running:
        raise RequestError(
            f"a search needs from {max(2, submit.n)} beams, n and at least 2, to {limits.max_running}, the requests "
            f"that this server runs at once; it has {beams}",
            param="num_beams",
            code="invalid_value",
        )
    if submit.produced:
        _check_produced(submit)
    total = tokens + submit.max_new_tokens
    if tokens > limits.max_input_len:
        _too_long(f"the prompt has {tokens} tokens; at most {limits.max_input_len} are allowed", "prompt")
    if total > limits.max_total_len:
        _too_long(
            f"{tokens} prompt tokens and max_new_tokens {submit.max_new_tokens} make {total}; "
            f"at most {limits.max_total_len} are allowed in all",
            "max_new_tokens",
        )
    for group in space.groups:
        answer = submit.max_new_tokens - 1
        need = group.granules(tokens + answer)
        # Beams run and end together, so there must be room for all of them.
        if (guaranteed or beams > 1) and answer:
            shared = tokens // group.granule
            need = shared + max(submit.n, beams) * (need - shared)
        if need > group.pool.total:
            _too_long(
                f"the request may need {need * group.granule} KV slots; this server has "
                f"{group.pool.total * group.granule}: lower max_new_tokens"
                + (" or the number of beams" if beams > 1 else " or n" if submit.n > 1 else "")
                + ", or start the server with a larger --max_total_token_num",
                "max_new_tokens",
            )


def _too_long(message: str, param: str) -> None:
    raise RequestError(message, param=param, code="context_length_exceeded")
