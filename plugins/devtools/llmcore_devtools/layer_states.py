"""Hidden states of each layer, of our model and of transformers', to find the first layer that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from llmcore.layers.step import Step
from torch import nn

if TYPE_CHECKING:
    from llmcore_devtools.loaded_model import LoadedModel

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
