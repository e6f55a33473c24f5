"""The runner by hand-made plans: device tables, mixed steps, forks, copies, preemption and granules."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from llmcore.api.bridge import SamplingParams
from llmcore.api.protocols import Device
from llmcore.builtin.devices.cpu import CPU
from llmcore.config import Config
from llmcore.engine.model_runner import GroupKV, ModelRunner, StepOps
from llmcore.engine.own_draw import OwnSampler
from llmcore.engine.sampler import RowSampler
from llmcore.engine.upload import Tables, Upload
from llmcore.layers import Build
from llmcore.ops import sample_best, sample_part, sample_pick
from llmcore.ops.sample import VARIANTS, Sampler, reference
from llmcore.registry.loader import build_registry
from llmcore.sched.plan import Admitted, StepPlan, StepResult, TableWrites, frame_of
from llmcore_devtools.fake_files import fake_answer, read_config
from llmcore_devtools.fake_model import FakeModel
from llmcore_devtools.faulty_engine import StepFaults
from torch.utils._python_dispatch import TorchDispatchMode

MAX_LEN = 64
CONFIG = {"vocab_size": 275, "max_position_embeddings": MAX_LEN, "eos_token_id": 257}
GREEDY = SamplingParams(temperature=0.0)


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


@dataclass
class Rig:
    """A runner over the fake model, with the granules of each request handed out by the test."""

    runner: ModelRunner
    tables: Tables
    granule: int
    device: Device
    number: int = 0
    apart: bool = False
    """Steps are prepared while everything of the device, and every operator of torch, raises."""

    def step(
        self,
        rows: list[tuple[int, int, int]],
        sample: list[tuple[int, int]],
        *,
        admitted: list[Admitted] | None = None,
        writes: list[tuple[int, int, int]] | None = None,
        copies: list[tuple[int, int]] | None = None,
    ) -> StepResult:
        """`rows`: (request, n_query, start); `sample`: (row, request); `writes`: (request, place, granule)."""
        columns = np.array(writes or np.empty((0, 3)), np.int32).T
        plan = StepPlan(
            number=self.number,
            request=ints(*(r for r, _, _ in rows)),
            n_query=ints(*(n for _, n, _ in rows)),
            reserve=ints(*(n for _, n, _ in rows)),
            start=ints(*(s for _, _, s in rows)),
            want=np.zeros(len(rows), np.uint8),
            n_decode=sum(n == 1 for _, n, _ in rows),
            sample_row=ints(*(r for r, _ in sample)),
            sample_request=ints(*(q for _, q in sample)),
            admitted=admitted or [],
            writes=[TableWrites(*columns)],
            copies=[copies or []],
        )
        plan.frame = frame_of(plan, self.runner.graph_rows)
        self.number += 1
        with self.off_limits() if self.apart else nullcontext():
            prepared = self.runner.prepare(plan)
        result = self.runner.read(self.runner.enqueue(prepared))
        assert self.tables.computed[plan.request.tolist()].tolist() == (plan.start + plan.n_query).tolist()
        return result

    @contextmanager
    def off_limits(self) -> Iterator[None]:
        kind = type(self.device)
        names = [name for name in dir(self.device) if not name.startswith("_")]
        with pytest.MonkeyPatch.context() as patch, NoOperators():
            for name in names:
                patch.setattr(kind, name, property(_out_of_reach), raising=False)
            yield


class NoOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> None:
        raise AssertionError(f"{func} in a step's preparation")


def _out_of_reach(device: Device) -> None:
    raise AssertionError("the device is asked for something")


def ahead_cpu() -> CPU:
    """The CPU that can capture, from the plugin beside this file."""
    spec = importlib.util.spec_from_file_location("ahead_device", Path(__file__).with_name("ahead_device.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    device: CPU = module.AheadCPU()
    return device


def rig(granule: int = 1, graph_rows: int = 0, own: Mapping[str, Sequence[Sampler]] = MappingProxyType({})) -> Rig:
    config = read_config(CONFIG)
    device = ahead_cpu() if graph_rows else CPU()
    build = Build(
        registry=build_registry(Config()),
        config=config,
        device=device.info,
        torch_device=device.torch_device,
        granules={"kv": granule},
    )
    model = FakeModel(build, config)
    model.salt.data.fill_(7.0)
    layout = build.layout("kv")
    tables = Tables(device, 4, MAX_LEN, (granule,))
    samplers = dict.fromkeys(VARIANTS, (reference,) * 5)
    groups = [GroupKV("kv", layout, 128 // granule, device.torch_device)]
    ops = StepOps(build.op("step_inputs"), build.op("step_outputs"), (build.op("kv_slots", granule=granule),))
    sampler, most = (
        RowSampler(tables, samplers, config.vocab_size, own),
        {"graph_rows": graph_rows, "graph_bytes": 1},
    )
    runner = ModelRunner(model, device, tables, groups, sampler, ops, **most)
    return Rig(runner, tables, granule, device)


def admit(index: int, tokens: list[int], *, prompt_len: int = 0, start: int = 0, **more: object) -> Admitted:
    values = {"sampling": GREEDY, "choice": 0, "min_new_tokens": 0, "stop_ids": (), **more}
    return Admitted(index, ints(*tokens), prompt_len or len(tokens), start, **values)  # type: ignore[arg-type]


def places(request: int, first: int, granules: list[int]) -> list[tuple[int, int, int]]:
    return [(request, first + i, granule) for i, granule in enumerate(granules)]


@pytest.mark.parametrize("granule", [1, 4])
def test_prefill_then_decode(granule: int) -> None:
    r, prompt = rig(granule), [5, 9, 200, 3, 77]
    granules = list(range(31, 31 - 16 // granule, -1))
    out = r.step([(2, 5, 0)], [(0, 2)], admitted=[admit(2, prompt)], writes=places(2, 0, granules))
    produced = [int(out.tokens[0])]
    for at in range(5, 10):
        produced.append(int(r.step([(2, 1, at)], [(0, 2)]).tokens[0]))
    assert produced == fake_answer(prompt, 6)


def test_chunks_mixed_with_decode_rows() -> None:
    r, first, second = rig(), [1, 2, 3], [9, 8, 7, 6, 5, 4]
    out = r.step([(0, 3, 0)], [(0, 0)], admitted=[admit(0, first)], writes=places(0, 0, [50, 3, 4, 9, 60, 61]))
    a = [int(out.tokens[0])]
    out = r.step(
        [(0, 1, 3), (1, 4, 0)], [(0, 0)], admitted=[admit(1, second)], writes=places(1, 0, list(range(20, 32)))
    )
    a.append(int(out.tokens[0]))
    out = r.step([(0, 1, 4), (1, 2, 4)], [(0, 0), (1, 1)])
    a.append(int(out.tokens[0]))
    b = [int(out.tokens[1])]
    out = r.step([(0, 1, 5), (1, 1, 6)], [(0, 0), (1, 1)])
    assert [*a, int(out.tokens[0])] == fake_answer(first, 4)
    assert [*b, int(out.tokens[1])] == fake_answer(second, 2)


def test_a_prefix_hit_starts_late() -> None:
    r, prompt = rig(), [4, 4, 8, 15, 16, 23]
    shared = [10, 12, 14, 16, 18, 20]
    r.step([(0, 6, 0)], [(0, 0)], admitted=[admit(0, prompt)], writes=places(0, 0, shared))
    longer = [*prompt[:5], 99, 98]
    out = r.step(
        [(3, 2, 5)],
        [(0, 3)],
        admitted=[admit(3, longer, start=5)],
        writes=places(3, 0, [*shared[:5], 40, 41]),
    )
    assert out.tokens.tolist() == fake_answer(longer, 1)


@pytest.mark.parametrize("granule", [1, 4])
def test_a_fork_copies_before_it_writes(granule: int) -> None:
    r, prompt = rig(granule), [11, 22, 33, 44, 55, 66]
    sampled = SamplingParams(temperature=1.0, seed=5)
    held = -(-6 // granule)
    mine = list(range(1, 1 + held))
    admitted = [admit(0, prompt, sampling=sampled), admit(1, prompt, start=6, sampling=sampled, choice=1, fork_of=0)]
    out = r.step(
        [(0, 6, 0)], [(0, 0), (0, 1)], admitted=admitted, writes=[*places(0, 0, mine), *places(1, 0, mine)]
    )  # fmt: skip
    firsts = out.tokens.tolist()
    assert firsts[0] != firsts[1]
    if granule == 1:
        out = r.step([(0, 1, 6), (1, 1, 6)], [(0, 0), (1, 1)], writes=[(0, 6, 20), (1, 6, 21)])
    else:
        out = r.step([(0, 1, 6), (1, 1, 6)], [(0, 0), (1, 1)], writes=[(1, 1, 9)], copies=[(mine[1], 9)])
    for choice, (request, first) in enumerate(zip((0, 1), firsts, strict=True)):
        alone = rig(granule)
        tokens = [*prompt, first]
        again = alone.step(
            [(request, 7, 0)],
            [(0, request)],
            admitted=[admit(request, tokens, prompt_len=6, sampling=sampled, choice=choice)],
            writes=places(request, 0, list(range(30 - -(-7 // granule), 30))),
        )
        assert again.tokens.tolist() == [int(out.tokens[choice])]


def test_a_nan_stays_with_its_row() -> None:
    r = rig()
    r.runner._model._faults = StepFaults({"nan": 13}, answers=94)
    rows, writes = [(0, 2, 0), (1, 2, 0)], [*places(0, 0, [1, 2]), *places(1, 0, [3, 4])]
    out = r.step(rows, [(0, 0), (1, 1)], admitted=[admit(0, [7, 13]), admit(1, [7, 12])], writes=writes)
    assert out.finite.tolist() == [False, True]
    assert int(out.tokens[1]) == fake_answer([7, 12], 1)[0]


def test_bias_penalties_and_logprobs_reach_the_sampler() -> None:
    r, prompt = rig(), [1, 2, 3]
    best = fake_answer(prompt, 1)[0]
    banned = SamplingParams(temperature=0.0, logit_bias={best: -100.0}, logprobs=2)
    admitted = [admit(0, prompt, sampling=banned), admit(1, prompt, min_new_tokens=2, stop_ids=(best,))]
    out = r.step(
        [(0, 3, 0), (1, 3, 0)],
        [(0, 0), (1, 1)],
        admitted=admitted,
        writes=[*places(0, 0, [1, 2, 3]), *places(1, 0, [4, 5, 6])],
    )
    assert best not in out.tokens.tolist()
    assert out.tokens[0] == out.tokens[1]
    assert out.top_ids is not None and out.logprobs is not None and out.top_logprobs is not None
    assert out.top_ids[0].tolist()[0] == best
    assert out.logprobs[0] == pytest.approx(out.top_logprobs[0][1])


def decoded(r: Rig, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """Prefill all prompts in one step, then decode them side by side."""
    n = len(prompts)
    width = MAX_LEN // 4
    out = r.step(
        [(q, len(prompt), 0) for q, prompt in enumerate(prompts)],
        [(q, q) for q in range(n)],
        admitted=[admit(q, prompt) for q, prompt in enumerate(prompts)],
        writes=[w for q in range(n) for w in places(q, 0, list(range(q * width, (q + 1) * width)))],
    )
    answers = [[int(token)] for token in out.tokens]
    for at in range(steps):
        out = r.step([(q, 1, len(prompts[q]) + at) for q in range(n)], [(q, q) for q in range(n)])
        for answer, token in zip(answers, out.tokens, strict=True):
            answer.append(int(token))
    return answers


@pytest.mark.parametrize(
    ("way", "asked"),
    [
        ({"temperature": 0.0}, "own_logits"),
        ({"temperature": 0.9, "seed": 5}, "own_logits"),
        ({"temperature": 0.9, "seed": 5, "top_k": 9}, "logits"),
        ({"temperature": 0.0, "logprobs": 2}, "logits"),
    ],
)
def test_ranks_gather_logits_for_draws_from_whole_rows_alone(way: dict[str, Any], asked: str) -> None:
    """Here the only rank's part is the whole vocabulary."""
    first = OwnSampler(0, sample_best.reference, lambda x: x[None], None, sample_pick.reference)
    own = {"greedy": (first,) * 5, "temperature": (replace(first, part=sample_part.reference),) * 5}
    tokens, calls = [], []
    for r in (rig(), rig(own=own)):
        model, whole = r.runner._model, r.runner._model.logits
        model.logits = lambda *states, of=whole: calls.append("logits") or of(*states)
        model.own_logits = lambda *states, of=whole: calls.append("own_logits") or of(*states)
        admitted = [admit(0, [7, 8, 9], sampling=SamplingParams(**way))]
        out = r.step([(0, 3, 0)], [(0, 0)], admitted=admitted, writes=places(0, 0, [9, 8, 7, 6, 5, 4]))
        tokens.append([int(out.tokens[0]), int(r.step([(0, 1, 3)], [(0, 0)]).tokens[0])])
    assert tokens[0] == tokens[1]
    assert calls == ["logits"] * 2 + [asked] * 2


def test_captured_steps_give_the_same_tokens() -> None:
    r, prompts = rig(graph_rows=4), [[5, 9, 200], [7], [1, 2, 3, 4]]
    assert decoded(r, prompts, 5) == [fake_answer(prompt, 6) for prompt in prompts]
    # three rows decode as four; the mixed step came once
    assert r.runner.graphs == 1
    scratch = r.tables.scratch
    assert int(r.tables.computed[scratch]) == 0 and int(r.tables.history[scratch, 0]) >= 0


def test_a_captured_mixed_step() -> None:
    r, first, second = rig(graph_rows=4), [1, 2, 3], [9, 8, 7, 6, 5, 4, 3, 2]
    out = r.step([(0, 3, 0)], [(0, 0)], admitted=[admit(0, first)], writes=places(0, 0, list(range(16))))
    a = [int(out.tokens[0])]
    admitted, writes = [admit(1, second)], places(1, 0, list(range(16, 32)))
    for at in (0, 2, 4):
        out = r.step([(0, 1, 3 + at // 2), (1, 2, at)], [(0, 0)], admitted=admitted, writes=writes)
        a.append(int(out.tokens[0]))
        admitted, writes = [], []
    out = r.step([(1, 2, 6)], [(0, 1)])
    assert (a, out.tokens.tolist()) == (fake_answer(first, 4), fake_answer(second, 1))
    assert r.runner.graphs == 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_is_prepared_without_the_device(ahead: int) -> None:
    """Beside plain steps: one that is admitted, one that forks and copies, one that is biased, and a captured one."""
    r, prompts = rig(graph_rows=4 * ahead), [[5, 9, 200], [7, 7], [1, 2, 3, 4]]
    r.apart = True
    assert decoded(r, prompts, 5) == [fake_answer(prompt, 6) for prompt in prompts]
    assert r.runner.graphs == ahead
    r = rig(granule=4)
    r.apart = True
    banned = SamplingParams(
        temperature=0.7, logit_bias={3: -100.0}, repetition_penalty=1.1, logprobs=2, allowed_ids=(3, 4)
    )
    admitted = [admit(3, [9, 8, 7], sampling=banned), admit(0, [9, 8, 7], start=3, sampling=banned, fork_of=3)]
    writes = [*places(3, 0, [30]), *places(0, 0, [30])]
    out = r.step([(3, 3, 0)], [(0, 3), (0, 0)], admitted=admitted, writes=writes)
    assert out.tokens.tolist() == [4, 4]
    out = r.step([(3, 1, 3), (0, 1, 3)], [(0, 3), (1, 0)], writes=[(0, 0, 31)], copies=[(30, 31)])
    assert out.tokens.tolist() == [4, 4]


@pytest.mark.parametrize("upload", ["_eager", "_changes"])
def test_an_upload_grows(upload: str) -> None:
    """What is prepared does not fit; the step that is sent makes room for itself and for those after it."""
    r = rig()
    r.apart = True
    uploaded = getattr(r.runner, upload)
    uploaded._reserve(4)
    before, moved = uploaded._remote, uploaded.layout
    out = r.step([(0, 3, 0)], [(0, 0)], admitted=[admit(0, [1, 2, 3])], writes=places(0, 0, [1, 2, 3, 4]))
    assert out.tokens.tolist() == fake_answer([1, 2, 3], 1)
    assert len(uploaded._remote) > len(before) and uploaded.layout != moved
    remote = uploaded._remote
    out = r.step([(0, 1, 3)], [(0, 0)])
    assert out.tokens.tolist() == fake_answer([1, 2, 3], 2)[1:]
    assert uploaded._remote is remote


def test_tables_too_large_to_number() -> None:
    with pytest.raises(ValueError, match="int32"):
        Tables(CPU(), 1 << 16, 1 << 15, (1,))


def test_who_is_admitted_together_is_written_where_it_belongs() -> None:
    tables = Tables(CPU(), 5, MAX_LEN, (1,))
    first = SamplingParams(temperature=0.5, top_p=0.25, min_p=0.125, typical_p=0.75, top_k=7, seed=-1)
    second = SamplingParams(
        repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.75, seed=1 << 33 | 5, penalize_prompt=True
    )
    admitted = [
        Admitted(4, ints(1, 2, 3), 2, 1, first, choice=3, min_new_tokens=0, stop_ids=()),
        Admitted(1, ints(9, 8), 2, 0, second, choice=0, min_new_tokens=0, stop_ids=()),
    ]
    upload = Upload(CPU(), 16, 1)
    tables.pack(admitted, [], upload)
    upload.send()
    tables.apply(len(admitted), [], upload)
    assert tables.history[4, :4].tolist() == [1, 2, 3, 0]
    assert tables.history[1, :4].tolist() == [9, 8, 0, 0]
    assert tables.lengths.tolist() == [0, 2, 0, 0, 3, 0]
    assert tables.computed.tolist() == [0, 0, 0, 0, 1, 0]
    assert tables.prompt_len.tolist() == [0, 2, 0, 0, 2, 0]
    assert tables.floats[:, 4].tolist() == [0.5, 0.25, 0.125, 0.75, 1.0, 0.0, 0.0]
    assert tables.floats[4:, 1].tolist() == [1.5, -0.5, 0.75]
    repeat_from = 0 if first.repetition_over_prompt else 2
    assert tables.ints[:, 4].tolist() == [7, 3, repeat_from, 2, -1, -1]
    assert tables.ints[:, 1].tolist() == [max(second.top_k, 0), 0, 0, 0, 5, 2]
    assert not tables.floats[:, [0, 2, 3, 5]].any() and not tables.ints[:, [0, 2, 3, 5]].any()


def test_kernels_find_columns_at_multiples_of_sixteen_bytes() -> None:
    tables = Tables(CPU(), 5, MAX_LEN + 1, (1,))
    for column in (tables.lengths, tables.computed, tables.prompt_len, tables.history, *tables.granules):
        assert column.is_contiguous() and column.data_ptr() % 16 == 0
    upload = Upload(CPU(), 16, 1)
    for size in (3, 1, 17, 4):
        upload.put(str(size), np.arange(size, dtype=np.int32))
    upload.send()
    assert [upload.get(name).data_ptr() % 16 for name in ("3", "1", "17", "4")] == [0, 0, 0, 0]
    assert upload.get("17").tolist() == list(range(17)) and upload.get("3").tolist() == [0, 1, 2]
