"""Traces of requests for a fleet: lengths of real conversations, with prefixes that several requests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from random import Random

from llmcore.fleet.hits import CHUNK

from llmcore_devtools.fleet.replica import Machine

Lengths = Sequence[tuple[int, int]]
"""(tokens of the prompt, tokens of the answer) of real requests."""

_APART = 1 << 32
"""Between the first chunks of two texts, so that no two texts have a chunk in common."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a trace. Its prompt is the beginning of the text `common`, and then of the text `own`."""

    time: float
    """Seconds at which it arrives: after the trace's start, or after the answer to `after`."""
    prompt: int
    """Tokens of its prompt."""
    answer: int
    """Tokens of its answer."""
    common: int
    shared: int
    """Tokens of the prompt that come from the common text, whole chunks."""
    own: int
    after: int | None = None
    """The number in the trace of the call before it, if it waits for the answer."""

    def chunks(self, tokens: int) -> list[int]:
        """The whole chunks of its first `tokens` tokens, of prompt and answer."""
        shared, every = self.shared // CHUNK, tokens // CHUNK
        common, own = self.common * _APART, self.own * _APART
        return [*range(common, common + min(shared, every)), *range(own, own + every - min(shared, every))]


@dataclass(frozen=True)
class Fleet:
    """Replicas, and what happens to them."""

    machines: Sequence[Machine]
    deaths: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Replica -> the seconds at which it dies, and at which it is back with an empty cache."""


@dataclass(frozen=True)
class Trace:
    """Calls by time, and the fleet that serves them. Calls that wait for others come last."""

    name: str
    calls: Sequence[Call]
    fleet: Fleet


def _plain(random: Random, lengths: Lengths, count: int) -> Iterator[tuple[Call, ...]]:
    """Nothing in common."""
    for number in range(count):
        prompt, answer = random.choice(lengths)
        yield (Call(0, prompt, answer, 0, 0, number + 1),)


def _prefixes(
    random: Random, lengths: Lengths, count: int, *, prefixes: int, power: float
) -> Iterator[tuple[Call, ...]]:
    """A prompt begins with one of `prefixes` texts of 512 to 4,096 tokens. The n-th is chosen with a weight of
    n^-power."""
    sizes = [random.randrange(8, 65) * CHUNK for _ in range(prefixes)]
    weights = [(number + 1) ** -power for number in range(prefixes)]
    for number, prefix in enumerate(random.choices(range(prefixes), weights, k=count)):
        prompt, answer = random.choice(lengths)
        yield (Call(0, sizes[prefix] + prompt, answer, prefix, sizes[prefix], prefixes + number),)


def _sessions(random: Random, lengths: Lengths, count: int) -> Iterator[tuple[Call, ...]]:
    """Two to eight turns. A prompt repeats all before it; a client reads and thinks for about ten seconds."""
    for number in range(count):
        time, before, turns = 0.0, 0, []
        for prompt, answer in random.choices(lengths, k=min(random.randrange(2, 9), count)):
            if before + prompt + answer > 16_000:
                break
            turns.append(Call(time, before + prompt, answer, 0, 0, number + 1))
            before += prompt + answer
            time += 0.04 * answer + random.expovariate(0.1)
        yield tuple(turns)


def _turns(random: Random, lengths: Lengths, count: int) -> Iterator[tuple[Call, ...]]:
    """Six turns without pauses, and all sessions at once, as agents do. Prompts add up to 400 tokens to what came
    before, and answers have up to 128."""
    for number in range(count):
        before, turns = 0, []
        for prompt, answer in random.choices(lengths, k=min(6, count)):
            turns.append(Call(0.0, before + min(prompt, 400), min(answer, 128), 0, 0, number + 1))
            before = turns[-1].prompt + turns[-1].answer
        yield tuple(turns)


def _hot(random: Random, lengths: Lengths, count: int) -> Iterator[tuple[Call, ...]]:
    """Six of ten prompts begin with the same 3,072 tokens."""
    for number in range(count):
        prompt, answer = random.choice(lengths)
        shared = 48 * CHUNK if random.random() < 0.6 else 0
        yield (Call(0, shared + prompt, answer, 0, shared, number + 1),)


def _deaths(random: Random, replicas: int, seconds: float) -> Mapping[int, tuple[float, float]]:
    """One of twenty replicas dies in the middle of the trace, and is back a quarter of it later."""
    dying = random.sample(range(replicas), max(1, replicas // 20))
    starts = {replica: seconds * random.uniform(0.3, 0.6) for replica in dying}
    return {replica: (start, start + seconds / 4) for replica, start in starts.items()}


@dataclass(frozen=True)
class _Kind:
    """The rules of a trace. `load`: the share of the fleet's time that the prompts take if no cache holds anything.
    `kv`: tokens in each replica's KV.
    `slow`: one of this number of replicas has a third of the speed, which its operator does not say; 0 for none.
    `waits`: the calls of a group wait for each other, and the first ones come at once."""

    make: Callable[[Random, Lengths, int], Iterator[tuple[Call, ...]]]
    load: float
    kv: int = Machine.kv
    slow: int = 0
    deaths: bool = False
    waits: bool = False


_ZIPF = partial(_prefixes, prefixes=400, power=1.1)

TRACES: Mapping[str, _Kind] = {
    "plain": _Kind(_plain, 0.4),
    "zipf": _Kind(_ZIPF, 1.0),
    "sessions": _Kind(_sessions, 0.7),
    "turns": _Kind(_turns, 1.0, waits=True),
    "hot": _Kind(_hot, 0.8),
    "memory": _Kind(_ZIPF, 0.7, kv=30_000),
    "slow": _Kind(_ZIPF, 0.8, slow=10),
    "deaths": _Kind(_ZIPF, 0.8, deaths=True),
}
"""Name -> what it is made of."""


def make_trace(name: str, lengths: Lengths, replicas: int, requests: int, seed: int = 0) -> Trace:
    """The trace `name` of TRACES: `requests` calls for `replicas` replicas. Raises KeyError for another name."""
    kind, random = TRACES[name], Random(f"{name} {seed}")
    groups: list[tuple[Call, ...]] = []
    count = 0
    for group in kind.make(random, lengths, requests):
        groups.append(group[: requests - count])
        count += len(groups[-1])
        if count == requests:
            break
    machine = Machine(kv=kind.kv)
    work = sum(machine.prefill(call.prompt) for call in chain.from_iterable(groups))
    seconds = work / (kind.load * replicas)
    calls = _waiting(groups) if kind.waits else _spread(random, groups, seconds)
    slow = Machine(speed=1 / 3, kv=kind.kv)
    machines = [slow if kind.slow and not index % kind.slow else machine for index in range(replicas)]
    deaths = _deaths(random, replicas, seconds) if kind.deaths else {}
    return Trace(name, calls, Fleet(machines, deaths))


def _spread(random: Random, groups: Sequence[Sequence[Call]], seconds: float) -> list[Call]:
    """The calls by time. Groups begin at random within `seconds`, and what comes later comes at the beginning."""
    calls = []
    for group in groups:
        start = random.uniform(0, seconds)
        calls += [replace(call, time=(start + call.time) % seconds) for call in group]
    return sorted(calls, key=lambda call: call.time)


def _waiting(groups: Sequence[Sequence[Call]]) -> list[Call]:
    """The first calls of the groups, the second ones, and so on. Each waits for the one before it."""
    calls, last = list[Call](), dict[int, int]()
    for turn in range(max(map(len, groups))):
        for session, group in enumerate(groups):
            if turn < len(group):
                calls.append(replace(group[turn], after=last.get(session)))
                last[session] = len(calls) - 1
    return calls
