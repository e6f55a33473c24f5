"""Comparison of a model family with transformers: same weights, same logits, same greedy tokens.

`assert_family_matches_transformers("LlamaForCausalLM")` in a plugin's test makes a small random model with
transformers, saves it, and loads it as the engine does. It compares whole prompts, prompts in chunks, and steps that
mix prefill with decode. To name the first layer that differs, it compares the hidden states of each.
`LoadedModel` drives a model by hand, for tests that need more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from llmcore.api.errors import reraise_if_stopping, text_of
from llmcore.layers.step import Step
from llmcore.registry.registry import Registry
from torch import nn

from llmcore_devtools.loaded_model import Generated, LoadedModel, Row

EMBEDDING, LOGITS = "embed_tokens", "logits"

States = dict[str, torch.Tensor]
"""Part of a decoder -> [tokens, size] f32: "embed_tokens", "layers.0", "layers.0.self_attn", ..., "logits". A layer's
state is the residual stream after it: the sum of hidden and residual."""

Differs = Callable[[torch.Tensor, torch.Tensor], bool]
"""(our state, transformers') -> True if they differ."""


@torch.inference_mode()
def our_states(ours: LoadedModel, tokens: Sequence[int], chunk: int | None = None) -> States:
    """The states of a sequence that `ours` computes in chunks of `chunk` tokens."""
    with recording(*our_parts(ours.model), _stream) as found:
        logits = ours.all_logits(tokens, chunk=chunk)
    return {**_joined(found), LOGITS: logits.float()}


@torch.inference_mode()
def our_decoded_states(ours: LoadedModel, step: Step) -> States:
    """The states of one token that `step` decodes."""
    with recording(*our_parts(ours.model), _stream) as found:
        hidden, residual = ours.model(replace(step, sampled=None))
    return {**_joined(found), LOGITS: ours.model.logits(hidden, residual).float()}


@torch.inference_mode()
def their_states(theirs: Any, tokens: Sequence[int], past: Any = None) -> tuple[States, Any]:
    """The states of `tokens` in a transformers model, after the cache `past`, and the new cache."""
    ids = torch.tensor([list(tokens)], device=theirs.device)
    with recording(*their_parts(theirs), _first) as found:
        reply = theirs(input_ids=ids, past_key_values=past, use_cache=True)
    logits = reply.logits[0].float().view(-1, reply.logits.shape[-1])
    return {**_joined(found), LOGITS: logits}, reply.past_key_values


def first_difference(ours: States, theirs: States, differs: Differs) -> str | None:
    """Words about the first part whose states differ, or None if all agree."""
    parts = [name for name in ours if name in theirs and (name in (EMBEDDING, LOGITS) or name.count(".") == 1)]
    if (name := next((name for name in parts if differs(*_both(ours, theirs, name))), None)) is None:
        return None
    if name == LOGITS:
        return f"every layer agrees, and what comes after them does not (norm, lm_head): {_apart(ours, theirs, name)}"
    if name == EMBEDDING:
        return f"the first that differs is embed_tokens: {_apart(ours, theirs, name)}"
    inside = [part for part in ours if part.startswith(f"{name}.") and part in theirs]
    part = next((part for part in inside if differs(*_both(ours, theirs, part))), name)
    within = "" if part == name else f", in its {part.removeprefix(f'{name}.')}"
    return f"the first layer that differs is {name}{within}: {_apart(ours, theirs, part)}"


@contextmanager
def recording(
    first: nn.Module, parts: Mapping[str, nn.Module], value: Callable[[str, Any], torch.Tensor | None]
) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Record states during the block: the input of `first` as "embed_tokens", and the output of each of `parts`.

    `value`: (the part's name, its output) -> the state.
    """
    found: dict[str, list[torch.Tensor]] = {EMBEDDING: []}

    def keep(name: str, output: Any) -> None:
        if (state := value(name, output)) is not None:
            found.setdefault(name, []).append(state.detach().float().reshape(-1, state.shape[-1]))

    def before(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        keep(EMBEDDING, given[0] if given else named["hidden_states"])

    def after(name: str) -> Callable[..., None]:
        return lambda module, given, output: keep(name, output)

    hooks = [first.register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [module.register_forward_hook(after(name)) for name, module in parts.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def our_parts(model: Any) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The first layer, and every layer with its parts, by the names of the family."""
    layers = {f"layers.{name}": layer for name, layer in model.layers.items()}
    blocks = {name: model.get_submodule(model.wrapped.get(name, name)) for name in layers}
    return next(iter(layers.values())), _with_children(layers, blocks)


def their_parts(model: Any) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The first layer, and every layer with its parts, of a transformers model."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
    layers = {f"layers.{index}": layer for index, layer in enumerate(next(lists))}
    return layers["layers.0"], _with_children(layers, layers)


def _with_children(layers: Mapping[str, nn.Module], blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, layer in layers.items():
        found[name] = layer
        found |= {f"{name}.{child}": part for child, part in blocks[name].named_children()}
    return found


def _stream(name: str, output: Any) -> torch.Tensor | None:
    """The state of a layer's output or input: the sum of hidden and residual. Otherwise the first of the outputs."""
    if isinstance(output, tuple) and name.count(".") < 2:
        hidden, residual = output
        return hidden if residual is None else hidden + residual  # type: ignore[no-any-return]
    return _first(name, output)


def _first(name: str, output: Any) -> torch.Tensor | None:
    output = output[0] if isinstance(output, tuple) and output else output
    return output if isinstance(output, torch.Tensor) else None


def _joined(found: Mapping[str, list[torch.Tensor]]) -> States:
    return {name: torch.cat(states) for name, states in found.items() if states}


def _both(ours: States, theirs: States, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both states of one part, of equal length: for a scored prompt, transformers has only the last token's logits."""
    expected = theirs[name]
    return ours[name][-len(expected) :].to(expected.device), expected


def _apart(ours: States, theirs: States, name: str) -> str:
    """Words about the size and the place of the difference between two states."""
    mine, expected = _both(ours, theirs, name)
    if mine.shape != expected.shape:
        return f"{list(mine.shape)} where transformers has {list(expected.shape)}"
    errors = (mine - expected).abs().amax(-1)
    token, largest = int(errors.argmax()), float(expected.abs().max())
    return f"off by {float(errors[token]):.2g} at token {token} of {len(errors)}, of values up to {largest:.2g}"


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
"""The default config of a small random model. Its sizes and head groups are odd on purpose."""

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
"""Further defaults for models with latent attention, in which every head has its own keys."""


@torch.inference_mode()
def oracle(model: Any, prompt: Sequence[int], new: int) -> Generated:
    """The greedy tokens and logits of a transformers model, with its cache; of a model that scores, its one answer."""
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
    # torch's grouped products do not accept experts of every size
    config._experts_implementation = "eager"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        # torch's attention has no soft cap, but transformers 5.17 would use it
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
    """Raises AssertionError unless tokens are equal and logits agree within `tolerance` of the largest.

    `where`: (generated tokens before the one that differs) -> words about the layers, for the error.
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
    """True if shapes differ, if a value is NaN, or if values differ by more than `tolerance`.

    `tolerance` is relative to the largest value, or to 1 if that is larger.
    """
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
    """Words about the first layer whose states differ, for an error.

    It looks at the prompt, computed in chunks of `chunk` tokens, and then at the decode of each token after it.
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

    `prompts`: the prompts' lengths in tokens. `longest_request`: the server's longest request, for a rope that depends
    on it. `config_overrides`: fields of the transformers config, over `SMALL`. Raises AssertionError that names the
    kind of step, the token and the first layer that differ.
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
