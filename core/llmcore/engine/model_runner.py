"""The runner turns a StepPlan into one forward and one draw, without ever waiting for the device.

`prepare` packs a step on the host, `enqueue` sends it to the device, and `read` waits for its tokens. If rows have
logits processors on the host, `enqueue` enqueues the forward alone, and `draw` enqueues the rest once the processors
have answered. Until `read`, the tokens are on the device alone, where the next step finds them in the requests'
history.

The host decides three things about a step: its sizes, the columns of one upload, and a few choices. The sizes and the
choices are the key under which a CUDA graph captures and replays the step.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmcore.api.protocols import Device, Event, Int32
from llmcore.api.specs import bucket_of
from llmcore.engine.graphs import Action, Agree, Graphs
from llmcore.engine.model import Model
from llmcore.engine.probes import answered, part, put_probed
from llmcore.engine.sampler import Draw, RowSampler
from llmcore.engine.token_masks import Outcome, changed, put_outputs, settle
from llmcore.engine.upload import BatchPacker, Packed, Tables, Upload, padded_to
from llmcore.layers.layout import KV, Layout
from llmcore.layers.step import KVStep, Step
from llmcore.ops import DTYPES, Op
from llmcore.ops.sample import Sampled, with_logprobs
from llmcore.sched.plan import NONE, Frame, StepPlan, StepResult
from llmcore.sched.processors import Steered

_CHANGES, _FRAME = 1 << 14, 1 << 16
"""Numbers in an upload to begin with. A captured step's should never have to grow: graphs would be captured again."""


class GroupKV:
    """One KV group on the device, with `granules` granules for requests, and one more, number `padding`, for padding.

    `kv` holds the layout's pools per layer index of the model.
    """

    def __init__(self, name: str, layout: Layout, granules: int, where: torch.device) -> None:
        self.name = name
        self.layout = layout
        self.padding = granules
        self.kv: Mapping[int, KV] = layout.tensors(granules + 1, where)


class StepOps(NamedTuple):
    """The bookkeeping around a forward, a callable per token bucket; `slots` has them per KV group."""

    inputs: tuple[Op, ...]
    outputs: tuple[Op, ...]
    slots: tuple[tuple[Op, ...], ...]


@dataclass(frozen=True)
class Prepared:
    """A step that is packed in the host's memory. It is valid until the next step is prepared."""

    plan: StepPlan
    packed: Packed
    draw: Draw | None
    """None: logits processors have a say in it, so it is decided after the forward."""
    frame: Frame | None
    """The sizes of the captured graph that runs the step; None: it runs eagerly."""
    changes: Upload
    """The upload that holds what changes in the tables."""

    @property
    def key(self) -> tuple[object, ...]:
        """The sizes and the choices: a captured step serves every step with an equal key."""
        return (self.frame, self.draw, self.packed.keys)

    @property
    def check(self) -> int:
        """A CRC-32 of `key`: equal on two ranks that pack a plan in the same way."""
        return zlib.crc32(repr(self.key).encode())


@dataclass(frozen=True)
class Forward:
    """The results of a forward, on the device. A CUDA graph always writes them to the same place."""

    drawn: Sampled | None = None
    """None in a step that samples nothing, or whose draw is still to come."""
    logits: Tensor | None = None
    """[S, V], padding included, in a step whose draw is still to come."""
    probed: Mapping[str, Tensor] | None = None
    """Columns of a StepResult by name: what the plan's probes and pools asked for."""


@dataclass
class Launched:
    """An enqueued step."""

    prepared: Prepared
    columns: dict[str, Tensor]
    """The columns of its StepResult by name, on their way to the host; there are no `tokens` where it samples nothing,
    or as long as its draw is still to come."""
    logits: Tensor | None
    """Those of its Forward, as long as its draw is still to come."""
    event: Event

    @property
    def plan(self) -> StepPlan:
        """The plan that it executes."""
        return self.prepared.plan


class ModelRunner:
    """Executes plans on one device, in order.

    Steps that decode at most `graph_rows` rows (0: none), and small mixed ones, are captured; all graphs together take
    at most `graph_bytes`. `steered`: rows may have logits processors that work on the host.
    """

    unrepeatable = ""
    """The reason why no step can run after one that has failed, or "": the next step can run, if the device can."""

    def __init__(
        self,
        model: Model,
        device: Device,
        tables: Tables,
        groups: Sequence[GroupKV],
        sampler: RowSampler,
        ops: StepOps,
        *,
        graph_rows: int = 0,
        graph_bytes: int = 0,
        steered: bool = False,
    ) -> None:
        self._model = model
        self._device = device
        self._tables = tables
        self.groups = groups
        self._sampler = sampler
        self._ops = ops
        self.graph_rows = graph_rows if device.graphs else 0
        """Most rows of a captured decode step."""
        self._graphs: Graphs[Forward] | None = Graphs(device, graph_bytes) if self.graph_rows else None
        self._packer = BatchPacker(model.attention_kernels, [group.name for group in groups], tables.scratch)
        # A host buffer is written again only after the step that used it was read.
        turns = device.ahead + 1
        self._changes = Upload(device, _CHANGES, turns)
        self._eager = Upload(device, _CHANGES, turns)
        self._static = Upload(device, _FRAME, turns)
        self._drawing = Upload(device, _CHANGES, turns)
        # Graphs share their memory, so what the forward's leaves must be elsewhere before the draw's is replayed.
        self._logits: Tensor | None = None
        if steered and self.graph_rows:
            shape = self.graph_rows, model.config.vocab_size
            self._logits = torch.empty(shape, dtype=DTYPES[model.config.dtype], device=device.torch_device)
        for table, group in zip(tables.granules, groups, strict=True):
            table[tables.scratch] = group.padding

    @property
    def graphs(self) -> int:
        """The number of captured steps."""
        return 0 if self._graphs is None else len(self._graphs)

    def prepare(self, plan: StepPlan) -> Prepared:
        """Pack a step, on the host alone. Raises what the attention kernels' plans raise."""
        for upload in (self._changes, self._eager, self._static):
            upload.clear()
        self._sampler.admit(plan)
        prepared = self._pack(plan, None if self._graphs is None else plan.frame)
        if prepared.frame is not None and not _repeats(prepared):
            prepared = self._pack(plan, None)
        prepared.packed.upload.seal()
        self._tables.pack(plan.admitted, plan.writes, prepared.changes)
        for group, pairs in zip(self.groups, plan.copies, strict=False):
            if pairs:
                prepared.changes.put(f"copies/{group.name}", np.array(pairs, np.int32).T.reshape(-1))
        return prepared

    def decide(self, step: Prepared) -> Action:
        """The way to enqueue a step that was just prepared. Call it once for each step."""
        if step.frame is None or self._graphs is None:
            return Action.LAUNCH
        return self._graphs.decide(step.key, step.packed.upload.layout)

    @torch.inference_mode()
    def enqueue(self, step: Prepared, action: Action | None = None, agree: Agree | None = None) -> Launched:
        """Enqueue a step that was just prepared. Raises what the model raises.

        `action`: what `decide` said, on this rank or on the one that leads. `agree`: see Graphs.run.
        """
        action = self.decide(step) if action is None else action
        self._change(step)
        if action == Action.LAUNCH or self._graphs is None:
            out = self._forward(step)
        else:
            more = {} if agree is None else {"agree": agree}
            layout = step.packed.upload.layout
            out = self._graphs.run(step.key, layout, lambda: self._forward(step), action, **more)
        logits = None if out.logits is None else self._kept(out.logits, step.frame)
        columns = {} if out.drawn is None else self._to_host(out.drawn, step.plan)
        for name, column in (out.probed or {}).items():
            columns[name] = self._device.to_host(column)
        return Launched(step, columns, logits, self._device.event())

    @torch.inference_mode()
    def draw(self, step: Launched, steered: Sequence[Steered]) -> Outcome:
        """Enqueue the draw of a step that has `logits`; every step before it must have been read. `steered`: the
        logits processors of its late samples."""
        logits, plan, packed = step.logits, step.plan, step.prepared.packed
        assert logits is not None
        outcome = settle(plan, steered, step.event)
        upload = self._drawing
        upload.clear()
        put_outputs(plan, packed.sizes, outcome.late, self._tables.scratch, upload)
        draw = self._sampler.pack(plan, upload, packed.sizes.samples, outcome.ready)
        upload.seal()
        upload.send()
        on_device = any(bound.devices for _, bound in outcome.ready)
        fits = self._logits is not None and logits.data_ptr() == self._logits.data_ptr()
        if self._graphs is None or not fits or on_device or draw.biases or draw.rises:
            out = self._drawn(logits, step.prepared, draw, outcome if on_device else None)
        else:
            key = ("draw", step.prepared.frame, draw, packed.keys)
            layout = (packed.upload.layout, upload.layout)
            action = self._graphs.decide(key, layout)
            out = self._graphs.run(key, layout, lambda: self._drawn(logits, step.prepared, draw, None), action)
        assert out.drawn is not None
        step.columns |= self._to_host(out.drawn, plan)
        step.event, step.logits = self._device.event(), None
        return outcome

    @torch.inference_mode()
    def place(self, step: Launched, tokens: Int32, late: Sequence[int]) -> None:
        """Enter the tokens [S] that another rank has drawn for a step that has `logits`; -1 is an invalid one.

        `late`: request indices that get no token in this step.
        """
        packed, upload = step.prepared.packed, self._drawing
        upload.clear()
        put_outputs(step.plan, packed.sizes, late, self._tables.scratch, upload)
        upload.put("tokens", padded_to(packed.sizes.samples, tokens))
        upload.seal()
        upload.send()
        drawn, bucket = upload.get("tokens"), bucket_of(packed.sizes.tokens)
        request, n_query = packed.upload.get("request"), upload.get("n_query")
        self._outputs(bucket, request, n_query, upload.get("sample_request"), drawn, drawn >= 0)
        step.event, step.logits = self._device.event(), None

    def read(self, step: Launched) -> StepResult:
        """Wait for an enqueued step. Raises what the device raises."""
        step.event.wait()
        arrays: dict[str, Any] = {name: column.numpy() for name, column in step.columns.items()}
        tokens, best = arrays.pop("tokens", NONE), arrays.get("top_ids")
        usable = tokens >= 0
        if best is not None:
            usable &= ((best >= 0) & (best < self._model.config.vocab_size)).all(axis=1)
        return StepResult(tokens=tokens, finite=usable, **arrays)

    def _to_host(self, out: Sampled, plan: StepPlan) -> dict[str, Tensor]:
        """Start the copy of the plan's samples to the host; the step's event says when it is complete.

        `finite` stays behind: op `step_outputs` has said it with the tokens.
        """
        columns = {field.name: getattr(out, field.name) for field in fields(out) if field.name != "finite"}
        count = plan.sample_row.size
        return {name: self._device.to_host(column[:count]) for name, column in columns.items() if column is not None}

    def _pack(self, plan: StepPlan, frame: Frame | None) -> Prepared:
        upload = self._eager if frame is None else self._static
        packed = self._packer.pack(plan, frame, upload)
        if plan.probes or plan.pools:
            put_probed(plan, upload)
        draw = None if plan.late.size else self._sampler.pack(plan, upload, packed.sizes.samples)
        # A steady decode step needs one copy only. Long columns go elsewhere, so that they never make a frame grow.
        changes = self._changes if plan.admitted or any(plan.copies) else upload
        return Prepared(plan, packed, draw, frame, changes)

    def _change(self, step: Prepared) -> None:
        """Send the step; bring the tables up to date, and copy granules that other requests hold, too."""
        plan, upload = step.plan, step.changes
        upload.send()
        if upload is not step.packed.upload:
            step.packed.upload.send()
        self._tables.apply(len(plan.admitted), plan.writes, upload)
        for group, pairs in zip(self.groups, plan.copies, strict=False):
            if pairs:
                src, dst = upload.get(f"copies/{group.name}").long().view(2, len(pairs))
                for kv in group.kv.values():
                    group.layout.copy(kv, src, dst)

    def _kept(self, logits: Tensor, frame: Frame | None) -> Tensor:
        """The logits of a forward, in memory that no other graph writes."""
        kept = self._logits
        if frame is None or kept is None or kept.dtype != logits.dtype or len(logits) > len(kept):
            return logits
        return kept[: len(logits)].copy_(logits)

    def _drawn(self, logits: Tensor, prepared: Prepared, draw: Draw, steered: Outcome | None) -> Forward:
        """From logits to tokens, on the device alone unless processors of the device are in `steered`."""
        packed, upload = prepared.packed, self._drawing
        request, n_query = packed.upload.get("request"), upload.get("n_query")
        sample_request = upload.get("sample_request")
        if steered is None:
            out = self._sampler.draw(logits, sample_request, draw, upload)
        else:
            scores, fine = changed(logits, self._tables, prepared.plan, steered)
            out = replace(self._sampler.draw(scores, sample_request, replace(draw, logprobs=-1), upload), finite=fine)
        read = self._outputs(bucket_of(packed.sizes.tokens), request, n_query, sample_request, out.tokens, out.finite)
        if steered is not None and draw.logprobs >= 0:
            out = with_logprobs(logits.float(), read.clamp(min=0), fine, draw.logprobs)
        return Forward(replace(out, tokens=read))

    def _forward(self, prepared: Prepared) -> Forward:
        """The work between a step's columns and its tokens, on the device alone; this is what is captured."""
        plan, packed, draw = prepared.plan, prepared.packed, prepared.draw
        upload, n = packed.upload, packed.sizes.samples
        request, n_query = upload.get("request"), upload.get("n_query")
        step = self._step(plan, packed, request, n_query)
        states, probed = self._model(step), None
        if plan.probes or plan.pools:
            probed = answered(self._model, part(states, slice(n, None)), plan, upload)
            states = part(states, slice(n))
        if draw is None:
            return Forward(logits=self._model.logits(*states), probed=probed)
        sample_request = upload.get("sample_request")
        if not n:
            self._outputs(step.bucket, request, n_query, sample_request, sample_request, sample_request.bool())
            return Forward(probed=probed)
        own = self._sampler.reads_own(draw)
        logits = (self._model.own_logits if own else self._model.logits)(*states)
        out = self._sampler.draw(logits, sample_request, draw, upload, own=own)
        read = self._outputs(step.bucket, request, n_query, sample_request, out.tokens, out.finite)
        return Forward(replace(out, tokens=read), probed=probed)

    def _outputs(
        self, bucket: int, request: Tensor, n_query: Tensor, sample_request: Tensor, tokens: Tensor, finite: Tensor
    ) -> Tensor:
        """Bring the tables up to date after a step; [S] its tokens for the host."""
        tables, vocabulary = self._tables, self._model.config.vocab_size
        state = (tables.history, tables.lengths, tables.computed)
        read: Tensor = self._ops.outputs[bucket](state, request, n_query, sample_request, tokens, finite, vocabulary)
        return read

    def _step(self, plan: StepPlan, packed: Packed, request: Tensor, n_query: Tensor) -> Step:
        tables, upload, bucket = self._tables, packed.upload, bucket_of(packed.sizes.tokens)
        state = (tables.history, tables.computed, tables.prompt_len)
        tokens, positions, owner, prompt_len, kv_len = self._ops.inputs[bucket](
            state, request, n_query, upload.get("row"), upload.get("offset")
        )
        kv = {}
        for group, table, slots in zip(self.groups, tables.granules, self._ops.slots, strict=True):
            decode, prefill, mixed = packed.metas(group.name, table, kv_len)
            at = slots[bucket](table, owner, positions)
            kv[group.name] = KVStep(kv=group.kv, slots=at, decode=decode, prefill=prefill, mixed=mixed)
        sampled = None if packed.every else upload.get("sampled").long()
        if plan.probes or plan.pools:
            # no step with a prompt in it samples every token in order, so there are sampled ones to add to
            assert sampled is not None
            sampled = torch.cat((sampled, upload.get("probed").long()))
        return Step(
            bucket=bucket,
            n_decode=packed.n_decode,
            tokens=tokens,
            positions=positions.unsqueeze(0),
            prompt_len=prompt_len,
            sampled=sampled,
            kv=kv,
        )


def _repeats(step: Prepared) -> bool:
    """True if a captured step can run it: every kernel allows that, and its draw comes often enough."""
    return all(step.packed.keys) and (step.draw is None or step.draw.lasting)
