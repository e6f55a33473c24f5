"""A model on the CPU, or on a device, with its KV pools, driven step by step by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llmcore.api.protocols import AttnLimits, AttnRows, Device
from llmcore.api.specs import DeviceInfo, bucket_of
from llmcore.config import Config
from llmcore.engine.blueprint import Blueprint
from llmcore.layers.mesh import Mesh
from llmcore.layers.step import KVStep, Step
from llmcore.registry.loader import build_registry, select
from llmcore.registry.registry import Registry
from llmcore.weights.load import dummy_weights, load_weights
from llmcore.weights.source import open_checkpoint, read_model

from llmcore_devtools.kernels.attention_cases import Uploads


def registry_for_tests(plugins: Sequence[str] | None = None) -> Registry:
    """The registry of all installed plugins, or of those that `--plugins` would select."""
    return build_registry(Config(discovered=select(plugins).plugins))


@cache
def _all_installed() -> Registry:
    """Made once, because it takes as long as a small model does. Models read it, and do not change it."""
    return registry_for_tests()


@dataclass(frozen=True)
class Row:
    """New tokens of one request after `start` computed ones."""

    request: int
    tokens: tuple[int, ...]
    start: int
    prompt_len: int
    decode: bool = False


@dataclass
class Generated:
    """Greedy tokens, and for each the logits [vocab_size] whose largest it was."""

    tokens: list[int]
    logits: list[torch.Tensor]

    def take(self, logits: torch.Tensor) -> None:
        """Add the next token."""
        self.tokens.append(int(logits.argmax()))
        self.logits.append(logits)


class LoadedModel:
    """A model on the CPU (or on `device`) with its KV pools, driven step by step by hand. With a `mesh`, one rank's
    share of it: all ranks are driven alike.

    Requests get granules in a scattered order and never share one. `options`: those of plugins, for the constants of
    KV layouts.
    """

    def __init__(
        self,
        path: Path,
        *,
        data_type: str | None = None,
        registry: Registry | None = None,
        kernels: Mapping[str, str] | None = None,
        modes: Sequence[str] = (),
        granule: int = 1,
        tokens: int = 4096,
        requests: int = 16,
        dummy: bool = False,
        device: Device | None = None,
        longest_request: int | None = None,
        mesh: Mesh | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.device = torch.device("cpu") if device is None else device.torch_device
        registry = registry or _all_installed()
        checkpoint = open_checkpoint(registry, path, weights=not dummy)
        family, self.config = read_model(registry, checkpoint.config(), data_type)
        pins = [f"{op}={kernel}" for op, kernel in (kernels or {}).items()]
        plan = Blueprint(
            registry=registry,
            device=DeviceInfo("cpu") if device is None else device.info,
            family=family,
            model=self.config,
            checkpoint=checkpoint,
            granule=granule,
            longest_request=longest_request,
            mesh=mesh or Mesh(),
        )
        self.model, self.build, names, filling, _ = plan.pinned(modes, pins).build(self.device)
        weights = dummy_weights(self.model) if dummy else load_weights(self.model, filling, names, mesh=plan.mesh)
        self.build.calibrate(checkpoint, options or {})
        self.weight_bytes = weights.bytes
        self.layouts = {group.name: self.build.layout(group.name) for group in self.config.kv_groups}
        granules = tokens // granule
        self.pools = {name: layout.tensors(granules, self.device) for name, layout in self.layouts.items()}
        self.granule, self._per_request = granule, granules // requests
        order = np.random.default_rng(0).permutation(granules)[: requests * self._per_request]
        self.table = torch.from_numpy(order.reshape(requests, -1).astype(np.int32)).to(self.device)

        limits = AttnLimits(rows=requests, tokens=tokens, kv_len=tokens // requests)
        for kinds in self.model.attention_kernels.values():
            for kernel in (kernel for kernels in kinds for kernel in kernels or ()):
                kernel.workspace(limits)

    @torch.inference_mode()
    def all_logits(self, tokens: Sequence[int], *, chunk: int | None = None, last: int | None = None) -> torch.Tensor:
        """Logits [`last` or all, vocab_size] f32 of a sequence's tokens, computed in chunks of `chunk` tokens."""
        size, found = chunk or len(tokens), []
        for start in range(0, len(tokens), size):
            part = tuple(tokens[start : start + size])
            step = replace(self.make_step([Row(0, part, start, len(tokens))]), sampled=None)
            hidden, residual = self.model(step)
            skip = max(0, len(tokens) - (last or len(tokens)) - start)
            if skip < len(part):
                residual = None if residual is None else residual[skip:]
                found.append(self.model.logits(hidden[skip:], residual).float())
        return torch.cat(found)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> torch.Tensor:
        """Run rows, decode rows first. Returns logits [len(rows), vocab_size] f32 of each row's last token."""
        step = self.make_step(rows)
        hidden, residual = self.model(step)
        logits: torch.Tensor = self.model.logits(hidden, residual).float()
        return logits

    def make_step(self, rows: Sequence[Row]) -> Step:
        """The step of these rows, after the `plan` of every kernel."""
        n_query = np.array([len(row.tokens) for row in rows], np.int32)
        kv_len = np.array([row.start for row in rows], np.int32) + n_query
        where = self.device
        n_decode = sum(1 for row in rows if row.decode)
        bucket = bucket_of(int(n_query.sum()))
        positions = torch.cat([torch.arange(row.start, row.start + len(row.tokens)) for row in rows])
        owner = torch.repeat_interleave(torch.tensor([row.request for row in rows]), torch.from_numpy(n_query))
        positions, owner = positions.to(where), owner.to(where)
        slots = self.table[owner, positions // self.granule].long() * self.granule + positions % self.granule
        request = torch.tensor([row.request for row in rows], dtype=torch.int32).to(where)
        kv: dict[str, KVStep] = {}
        for name, (decode, prefill, _) in self.model.attention_kernels.items():
            metas = []
            for kernels, part in ((decode, slice(0, n_decode)), (prefill, slice(n_decode, None))):
                borders = np.concatenate([[0], np.cumsum(n_query[part])]).astype(np.int32)
                meta = {
                    "table": self.table,
                    "request": request[part],
                    "q_start": torch.from_numpy(borders).to(where),
                    "kv_len": torch.from_numpy(kv_len[part]).to(where),
                }
                if len(n_query[part]):
                    kernels[bucket].plan(AttnRows(n_query=n_query[part], kv_len=kv_len[part]), Uploads(meta))
                metas.append(meta)
            kv[name] = KVStep(kv=self.pools[name], slots=slots, decode=metas[0], prefill=metas[1])
        prompts = torch.tensor([row.prompt_len for row in rows], dtype=torch.int32)
        return Step(
            bucket=bucket,
            n_decode=n_decode,
            tokens=torch.tensor([token for row in rows for token in row.tokens]).to(where),
            positions=positions.int().unsqueeze(0),
            prompt_len=prompts.repeat_interleave(torch.from_numpy(n_query)).to(where),
            sampled=torch.from_numpy(np.cumsum(n_query) - 1).to(where),
            kv=kv,
        )

    def generate(self, prompt: Sequence[int], new: int, *, chunk: int | None = None, request: int = 0) -> Generated:
        """`new` greedy tokens after `prompt`, computed in chunks of `chunk` tokens."""
        size = chunk or len(prompt)
        for start in range(0, len(prompt), size):
            part = prompt[start : start + size]
            logits = self.step([Row(request, tuple(part), start, len(prompt))])
        out = Generated([], [])
        for index in range(new):
            out.take(logits[0])
            if index + 1 < new:
                start = len(prompt) + index
                logits = self.step([Row(request, (out.tokens[-1],), start, len(prompt), decode=True)])
        return out

    def generate_mixed(self, prompts: Sequence[Sequence[int]], new: int, chunk: int) -> list[Generated]:
        """Greedy tokens after several prompts at once.

        Request i starts i steps late, in chunks of `chunk` tokens, so that steps mix decode rows with prompt chunks.
        """
        outs = [Generated([], []) for _ in prompts]
        done = [0] * len(prompts)
        late = 0
        while any(len(out.tokens) < new for out in outs):
            late += 1
            rows: list[Row] = []
            for index, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
                if index >= late or len(out.tokens) >= new:
                    continue
                decode = done[index] >= len(prompt)
                tokens = (out.tokens[-1],) if decode else tuple(prompt[done[index] : done[index] + chunk])
                rows.append(Row(index, tokens, done[index], len(prompt), decode))
            rows.sort(key=lambda row: (not row.decode, len(row.tokens)))
            for row, logits in zip(rows, self.step(rows), strict=True):
                done[row.request] += len(row.tokens)
                if done[row.request] >= len(prompts[row.request]):
                    outs[row.request].take(logits)
        return outs
