"""Holding a model family against transformers: same weights, same logits, same greedy tokens.

`assert_family_matches_transformers("LlamaForCausalLM")` in a plugin's test makes a small random model with
transformers, saves it, loads it the way the engine does, and compares whole prompts, prompts in chunks, and steps
that mix prompts with decoding. `LoadedModel` drives a model by hand, for tests that need more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from llmcore.config import Config
from llmcore.errors import reraise_if_stopping, text_of
from llmcore.layers.build import Build
from llmcore.layers.step import KVStep, Step
from llmcore.modes import Pins
from llmcore.ops.attention_cases import Uploads
from llmcore.plugins import build_registry, discover, load
from llmcore.protocols import AttnLimits, AttnRows, Device
from llmcore.registry import Registry
from llmcore.specs import DeviceInfo, bucket_of
from llmcore.weights.load import dummy_weights, load_weights
from llmcore.weights.quant import find_quantization, linear_method_of, unquantized
from llmcore.weights.source import open_checkpoint, read_model

from llmcore_devtools.layer_states import first_difference, our_decoded_states, our_states, their_states

SMALL: Mapping[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""What a small random model has where a test does not say otherwise; odd sizes and head groups on purpose."""

SMALL_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
"""The same for models with latent attention, whose heads all have keys of their own."""


def registry_for_tests(plugins: Sequence[str] | None = None) -> Registry:
    """Everything installed, or what `--plugins` would select."""
    return build_registry(Config(discovered=discover(plugins)))


class LoadedModel:
    """A model on the CPU (or on `device`) with its KV pools, driven step by step by hand.

    Granules are handed out in a scattered order and requests never share any.
    """

    def __init__(
        self,
        path: Path,
        *,
        data_type: str | None = None,
        registry: Registry | None = None,
        kernels: Mapping[str, str] | None = None,
        granule: int = 1,
        tokens: int = 4096,
        requests: int = 16,
        dummy: bool = False,
        device: Device | None = None,
        longest_request: int | None = None,
    ) -> None:
        self.device = torch.device("cpu") if device is None else device.torch_device
        registry = registry or registry_for_tests()
        checkpoint = open_checkpoint(registry, path, weights=not dummy)
        spec, self.config = read_model(registry, checkpoint.config(), data_type)
        quantized = find_quantization(registry, checkpoint.config(), self.config)
        self.build = Build(
            registry=registry,
            config=self.config,
            device=DeviceInfo("cpu") if device is None else device.info,
            torch_device=self.device,
            pins=Pins(kernels=kernels or {}),
            granules={group.name: granule for group in self.config.kv_groups},
            linear_method=linear_method_of(quantized),
            longest_request=longest_request,
        )
        self.model = load(spec.build)(self.config, self.build)
        if dummy:
            self.weight_bytes = dummy_weights(self.model)
        else:
            checkpoint = unquantized(quantized, checkpoint)
            self.weight_bytes = load_weights(self.model, checkpoint, load(spec.weights)(self.config))
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
        """Run rows, those that decode first; logits [len(rows), vocab_size] f32 of each row's last token."""
        step = self.make_step(rows)
        hidden, residual = self.model(step)
        logits: torch.Tensor = self.model.logits(hidden, residual).float()
        return logits

    def make_step(self, rows: Sequence[Row]) -> Step:
        """The step of these rows, with every kernel's plan made."""
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
        """Greedy tokens after several prompts at once: request i starts i steps late, in chunks of `chunk`, so that
        steps mix rows that decode with chunks of prompts.
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
    """Greedy tokens and the logits [vocab_size] each was the largest of."""

    tokens: list[int]
    logits: list[torch.Tensor]

    def take(self, logits: torch.Tensor) -> None:
        """The next token."""
        self.tokens.append(int(logits.argmax()))
        self.logits.append(logits)


@torch.inference_mode()
def oracle(model: Any, prompt: Sequence[int], new: int) -> Generated:
    """What a transformers model generates greedily, with its cache; of a model that scores, the one answer it has."""
    out, past, ids = Generated([], []), None, torch.tensor([list(prompt)], device=model.device)
    for _ in range(new):
        reply = model(input_ids=ids, past_key_values=past, use_cache=True)
        if reply.logits.dim() == 2:
            out.take(reply.logits[0].float())
            break
        past = reply.past_key_values
        out.take(reply.logits[0, -1].float())
        ids = torch.tensor([[out.tokens[-1]]], device=model.device)
    return out


def small_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model in f32 on the CPU; biases and norms are random too."""
    model_class = getattr(transformers, architecture)
    latent = SMALL_LATENT if hasattr(model_class.config_class, "kv_lora_rank") else {}
    config = model_class.config_class(**{**SMALL, **latent, **overrides})
    # experts of any size, which the grouped products of torch do not take
    config._experts_implementation = "eager"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        # torch's attention has no soft cap; transformers 5.17 uses it all the same
        config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    # routers keep their correction as a buffer
    kept = [buffer for name, buffer in model.named_buffers() if name.endswith("bias")]
    with torch.no_grad():
        for parameter in (*model.parameters(), *kept):
            # a norm may hold a row per head
            if parameter.dim() == 1 or bool((parameter == 1).all()):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def assert_same(
    name: str,
    got: Generated,
    expected: Generated,
    tolerance: float,
    where: Callable[[Sequence[int]], str] = lambda before: "",
) -> None:
    """Tokens equal, and logits within `tolerance` of the largest. `where`: what to say of the layers, by the generated
    tokens before the one that differs.
    """
    for index, (ours, theirs) in enumerate(zip(got.logits, expected.logits, strict=True)):
        if differs(ours, theirs, tolerance):
            error = float((ours - theirs).abs().max())
            raise AssertionError(
                f"{name}: logits of token {index} are off by {error:.2g}{where(expected.tokens[:index])}"
            )
        assert got.tokens[index] == expected.tokens[index], (
            f"{name}: token {index} is {got.tokens[index]}, transformers has {expected.tokens[index]}"
        )


def differs(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    """True if shapes differ, or values by more than `tolerance` of the largest or of 1, or if any is NaN."""
    if ours.shape != theirs.shape:
        return True
    return not float((ours - theirs).abs().max()) <= tolerance * max(float(theirs.abs().max()), 1.0)


def where_they_part(
    theirs: Any,
    ours: LoadedModel,
    prompt: Sequence[int],
    generated: Sequence[int],
    tolerance: float,
    chunk: int | None = None,
) -> str:
    """The first layer whose states differ, for an error: in the prompt, computed in chunks of `chunk` tokens, or when
    the tokens after it are decoded one by one.
    """
    apart = partial(differs, tolerance=tolerance)
    expected, past = their_states(theirs, prompt)
    if (found := first_difference(our_states(ours, prompt, chunk), expected, apart)) is not None:
        return f"; {found}"
    for count, token in enumerate(generated):
        row = Row(0, (token,), len(prompt) + count, len(prompt), decode=True)
        expected, past = their_states(theirs, [token], past)
        if (found := first_difference(our_decoded_states(ours, ours.make_step([row])), expected, apart)) is not None:
            return f"; the prompt agrees, and when token {count} is decoded, {found}"
    return "; every layer agrees when this request is computed alone, so look at steps of several requests"


def assert_family_matches_transformers(
    architecture: str,
    *,
    prompts: Sequence[int] = (1, 13, 30),
    new: int = 6,
    tolerance: float = 1e-4,
    registry: Registry | None = None,
    seed: int = 0,
    longest_request: int | None = None,
    **config_overrides: Any,
) -> None:
    """Compare a family with transformers in f32, on a small random model of `architecture`.

    `prompts`: their lengths in tokens; `longest_request`: what a server takes, for a rope that is chosen by it;
    `config_overrides`: fields of the transformers config, over `SMALL`. Raises
    AssertionError that says in which mode of running, at which token and from which layer on they differ.
    """
    theirs = small_model(architecture, seed, **config_overrides)
    draw = np.random.default_rng(seed)
    ids = [draw.integers(0, theirs.config.vocab_size, n).tolist() for n in prompts]
    expected = [oracle(theirs, prompt, new) for prompt in ids]
    new = len(expected[0].tokens)

    def said(ours: LoadedModel, prompt: Sequence[int], chunk: int | None) -> Callable[[Sequence[int]], str]:
        def where(generated: Sequence[int]) -> str:
            try:
                return where_they_part(theirs, ours, prompt, generated, tolerance, chunk)
            except BaseException as error:  # noqa: BLE001 - the difference that was found has to be reported in any case
                reraise_if_stopping(error)
                return f"; the layers cannot be compared ({text_of(error)})"

        return where

    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        for granule in (1, 4):
            ours = LoadedModel(Path(folder), registry=registry, granule=granule, longest_request=longest_request)
            for prompt, want in zip(ids, expected, strict=True):
                for chunk in (None, 5):
                    got = ours.generate(prompt, new, chunk=chunk)
                    name = f"{len(prompt)} tokens, chunks of {chunk}, granule {granule}"
                    assert_same(name, got, want, tolerance, said(ours, prompt, chunk))
            mixed = ours.generate_mixed(ids, new, chunk=7)
            for prompt, got, want in zip(ids, mixed, expected, strict=True):
                name = f"{len(prompt)} tokens in mixed steps, granule {granule}"
                assert_same(name, got, want, tolerance, said(ours, prompt, 7))
