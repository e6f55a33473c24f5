"""Small random models of every family on this device, beside transformers. Exit code 1 if a limit is exceeded.

    python benchmarks/families.py [--only gemma2 olmo2 ...] [--jobs 8] [--device cpu --shrink 16]

The script compares the relative L2 error of bf16 logits, against transformers in f32 on the same weights, with that of
transformers' own bf16 (at most 1.1 of it): for whole prompts, in chunks and decoding. Greedy ids in f32 must be
transformers'. `--jobs` processes share the families, because most of the time goes into compiling kernels. `--shrink`
divides lengths, to try the script on any machine.

The scores that decide a mixture's route lie close to each other. If rounding changes an expert, comparing the errors
says nothing. So here routers read CODE elements of the hidden states that only embeddings write: the experts of a
token then depend on the token alone. Prompts have only tokens whose route is stable. It must not change when those
elements are off by NOISE, some times more than bf16's rounding, nor in transformers' own bf16. It must also be the one
that the op's reference finds for our hidden states. Everything else is unchanged: a kernel that routes wrongly is
found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.engine.blueprint import fallbacks
from llmcore.engine.model import pick_device
from llmcore.layers.moe import MoE
from llmcore.ops import moe, moe_route
from llmcore_devtools.family import oracle, our_states, small_model, their_states, where_they_part
from llmcore_devtools.loaded_model import LoadedModel, Row, registry_for_tests
from oracle import decoded_logits, relative, their_logits

ERROR_LIMIT = 1.1
"""Limit, as a factor of transformers' error."""

CODE, NOISE, TRIES = 32, 0.02, 4
REQUESTS, LENGTH = 16, 1024
"""Rows that fit at once, and tokens of each."""

Fields = Mapping[str, Any]


def heads(heads: int, kv_heads: int, size: int, inner: int, hidden: int | None = None) -> dict[str, Any]:
    """Returns the sizes of a decoder."""
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size}
    return {**counts, "hidden_size": hidden or heads * size, "intermediate_size": inner}


def experts(count: int, top_k: int, inner: int, **more: Any) -> dict[str, Any]:
    """Returns a mixture in the terms of Qwen's configs."""
    return {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": inner, **more}


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    """Returns the rope of the whole model."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e5, **numbers}}


BASE = {"vocab_size": 512, "num_hidden_layers": 3, "max_position_embeddings": 2 * LENGTH, "initializer_range": 0.06}
PAIRS, WIDE, ODD = heads(4, 2, 64, 512), heads(4, 1, 128, 704), heads(3, 3, 80, 336)
OWN = heads(2, 1, 256, 512, hidden=320)
TIED, WINDOW = {"tie_word_embeddings": True}, {"sliding_window": 100}
LAST_TWO = {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}
LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=LENGTH // 4
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=LENGTH // 4)
SCALES = rope("yarn", factor=8.0, original_max_position_embeddings=LENGTH // 8, mscale=0.9, mscale_all_dim=0.6)
GRANITE = {"embedding_multiplier": 2.5, "attention_multiplier": 0.1, "residual_multiplier": 0.7, "logits_scaling": 3.0}
GEMMA3 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
LATENT = {
    **heads(4, 4, 32, 512, hidden=256),
    **{"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "q_lora_rank": None},
    **{"moe_intermediate_size": 96, "n_shared_experts": 2, "first_k_dense_replace": 1},
}
GREEDY = {"n_routed_experts": 16, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}
LIMITED = {"n_routed_experts": 32, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}

FAMILIES: Mapping[str, tuple[str, tuple[Fields, ...]]] = {
    "llama": ("Llama", (PAIRS | LLAMA3, WIDE | TIED, ODD | {"attention_bias": True, "mlp_bias": True})),
    "qwen2": ("Qwen2", (PAIRS | YARN | TIED, WIDE | LAST_TWO)),
    "qwen3": ("Qwen3", (PAIRS | TIED, heads(7, 1, 80, 512, hidden=256) | {"attention_bias": True})),
    "qwen2-moe": (
        "Qwen2Moe",
        (
            PAIRS | experts(16, 4, 128) | {"shared_expert_intermediate_size": 192},
            WIDE
            | experts(60, 4, 64, norm_topk_prob=True, mlp_only_layers=[1])
            | {"shared_expert_intermediate_size": 96},
        ),
    ),
    "qwen3-moe": ("Qwen3Moe", (PAIRS | experts(64, 8, 64, norm_topk_prob=True), ODD | experts(8, 1, 240))),
    "mixtral": ("Mixtral", (PAIRS, WIDE | WINDOW | {"num_local_experts": 3, "num_experts_per_tok": 3})),
    "mistral": ("Mistral", (PAIRS | {"sliding_window": None}, WIDE | WINDOW)),
    "gemma2": (
        "Gemma2",
        (OWN | WINDOW, PAIRS | WINDOW | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 64}),
    ),
    "gemma3": ("Gemma3", (OWN | WINDOW | GEMMA3 | {"sliding_window_pattern": 2}, PAIRS | WINDOW)),
    "phi3": (
        "Phi3",
        (
            heads(4, 4, 96, 512) | WINDOW,
            PAIRS | rope("default", partial_rotary_factor=0.75) | {"sliding_window": None},
        ),
    ),
    "olmo2": ("Olmo2", (PAIRS, ODD | TIED)),
    "granite": ("Granite", (PAIRS | GRANITE, WIDE | GRANITE | TIED | {"attention_bias": True})),
    "starcoder2": ("Starcoder2", (PAIRS | WINDOW, ODD | {"use_bias": False, "sliding_window": None})),
    "stablelm": ("StableLm", (ODD, PAIRS | {"qk_layernorm": True, "use_parallel_residual": True})),
    "cohere": ("Cohere", (PAIRS, WIDE | {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False})),
    "deepseek-v2": (
        "DeepseekV2",
        (LATENT | GREEDY | SCALES, LATENT | LIMITED | {"topk_method": "group_limited_greedy", "q_lora_rank": 96}),
    ),
    "deepseek-v3": (
        "DeepseekV3",
        (LATENT | LIMITED | SCALES | {"q_lora_rank": 96}, LATENT | GREEDY | {"norm_topk_prob": False}),
    ),
}
"""Family -> the beginning of its architecture's name, and configs over BASE with heads of 64 to 256."""


@dataclass(frozen=True)
class Found:
    """The figures of one config."""

    family: str
    case: int
    theirs: float
    ratios: Mapping[str, float]
    """Our error over transformers', for each way of running."""
    equal: int
    """The number of greedy `answers` that equal transformers'."""
    answers: int
    routes: tuple[int, int] | None
    """Tokens of a mixture, and the number of them whose experts differ in bf16, theirs or ours."""
    torch_ops: tuple[str, ...]
    seconds: float
    where: str = ""
    """If a limit is exceeded: the first layer that differs."""

    @property
    def good(self) -> bool:
        """True if the config is within the limits."""
        return self.equal == self.answers and max(self.ratios.values()) <= ERROR_LIMIT

    def text(self) -> str:
        """Returns a line of the table."""
        ratios = " ".join(f"{name} {ratio:.3f}" for name, ratio in self.ratios.items())
        moved = "" if self.routes is None else f", routes moved {self.routes[1]} of {self.routes[0]}"
        slow = f", as torch reference: {', '.join(self.torch_ops)}" if self.torch_ops else ""
        verdict = "ok" if self.good else f"MISSED{self.where}"
        return (
            f"{self.family + ' ' + str(self.case):<14} theirs {self.theirs:.5f}; ours of it: {ratios}; "
            f"f32 ids {self.equal}/{self.answers}{moved}{slow} ({self.seconds:.0f} s) {verdict}"
        )


def cases(names: Sequence[str]) -> list[tuple[str, int]]:
    """Returns (family, number of its config) of all configs."""
    return [(name, index) for name in names for index in range(len(FAMILIES[name][1]))]


def check(family: str, index: int, device_name: str, shrink: int) -> Found:
    """Returns one config's errors of bf16 logits in four ways of running, and its greedy ids in f32."""
    began = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    registry = registry_for_tests()
    device = pick_device(registry, device_name)
    name, configs = FAMILIES[family]
    exact = small_model(f"{name}ForCausalLM", seed=index, **BASE, **configs[index])
    mixed = any(part.endswith(".experts") for part, _ in exact.named_modules())
    if mixed:
        route_by_token(exact)
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    load = partial(LoadedModel, tokens=REQUESTS * LENGTH, requests=REQUESTS, granule=(1, 16)[index % 2], device=device)
    with tempfile.TemporaryDirectory() as folder:
        exact.save_pretrained(folder)
        rough = type(exact).from_pretrained(
            folder,
            dtype=torch.bfloat16,
            experts_implementation="eager",
            attn_implementation=exact.config._attn_implementation,
        )
        rough.eval()
        ours, ours32 = (load(Path(folder), data_type=dtype, registry=registry) for dtype in ("bf16", "f32"))
    exact, rough = exact.to(device.torch_device), rough.to(device.torch_device)
    draw = np.random.default_rng(index)
    allowed = steady_tokens(exact, rough, draw) if mixed else np.arange(exact.config.vocab_size)

    def prompts(*lengths: int) -> list[list[int]]:
        return [draw.choice(allowed, max(2, length // shrink)).tolist() for length in lengths]

    errors: dict[str, tuple[float, float]] = {}
    choices = moved = 0
    for way, lengths, run in ways(shrink):
        parts = prompts(*lengths)
        for _ in range(TRIES if mixed else 0):
            if not (loose := moved_tokens(exact, rough, ours, parts)[1]):
                break
            allowed = np.setdiff1d(allowed, loose)
            parts = prompts(*lengths)
        got = torch.cat(run(ours, parts))
        count = len(got) // len(parts) if way.startswith("decode") else None
        expected, found = (
            torch.cat([their_logits(model, part, count or len(part)) for part in parts]) for model in (exact, rough)
        )
        errors[way] = relative(got, expected), relative(found, expected)
        if mixed:
            total, loose = moved_tokens(exact, rough, ours, parts)
            choices, moved = choices + total, moved + len(loose)
    equal, answers = greedy(exact, ours32, prompts(1, 60, 300), 4 if shrink > 1 else 16)
    resolutions = (*ours.build.resolutions, *ours32.build.resolutions)
    found = Found(
        family=family,
        case=index,
        theirs=errors["whole"][1],
        ratios={way: mine / theirs for way, (mine, theirs) in errors.items()},
        equal=equal,
        answers=answers,
        routes=(choices, moved) if mixed else None,
        torch_ops=tuple(fallbacks(registry, resolutions)) if device.measured else (),
        seconds=time.perf_counter() - began,
    )
    return found if found.good else replace(found, where=first_layers(exact, rough, ours, ours32, prompts(60)[0]))


def first_layers(exact: Any, rough: Any, ours: LoadedModel, ours32: LoadedModel, part: Sequence[int]) -> str:
    """The first layer whose bf16 error exceeds the limit, and the first whose f32 differs from transformers'."""
    (expected, _), (found, _), mine = their_states(exact, part), their_states(rough, part), our_states(ours, part)
    alike = [name for name in mine if name in found and mine[name].shape == found[name].shape]
    over = (
        name
        for name in alike
        if relative(mine[name], expected[name]) > ERROR_LIMIT * relative(found[name], expected[name])
    )
    return f"; in bf16 first {next(over, 'nothing')}; in f32{where_they_part(exact, ours32, part, [], 1e-4)}"


Run = Callable[[LoadedModel, Sequence[Sequence[int]]], list[torch.Tensor]]


def ways(shrink: int) -> Iterator[tuple[str, Sequence[int], Run]]:
    """Yields a name, prompt lengths, and a function that returns our logits: of all tokens, or of the decoded ones."""
    chunk, steps, alone = max(2, 96 // shrink), max(1, 12 // shrink), max(1, 48 // shrink)
    yield "whole", (33, 190, 500), lambda ours, parts: [ours.all_logits(part) for part in parts]
    yield "chunked", (700,), lambda ours, parts: [ours.all_logits(part, chunk=chunk) for part in parts]
    yield f"decode_{REQUESTS}", (150,) * REQUESTS, partial(decoded_together, count=steps)
    yield "decode_1", (300,), lambda ours, parts: [decoded_logits(ours, part, alone) for part in parts]


def decoded_together(ours: LoadedModel, parts: Sequence[Sequence[int]], count: int) -> list[torch.Tensor]:
    """Returns the logits of each prompt's last `count` tokens. All prompts are decoded in the same steps."""
    start = len(parts[0]) - count
    ours.step([Row(i, tuple(part[:start]), 0, start) for i, part in enumerate(parts)])
    found = []
    for at in range(start, len(parts[0])):
        found.append(ours.step([Row(i, (part[at],), at, start, decode=True) for i, part in enumerate(parts)]))
    return list(torch.stack(found, 1))


def greedy(exact: Any, ours: LoadedModel, parts: Sequence[Sequence[int]], new: int) -> tuple[int, int]:
    """The number of answers that equal transformers', and of all: whole prompts, in chunks, and in mixed steps."""
    wanted = [oracle(exact, part, new).tokens for part in parts]
    got = [ours.generate(part, new, chunk=chunk).tokens for chunk in (None, 48) for part in parts]
    got += [answer.tokens for answer in ours.generate_mixed(parts, new, chunk=48)]
    return sum(a == b for a, b in zip(got, wanted * 3, strict=True)), len(got)


# --- routes ----------------------------------------------------------------------------------------------------


def route_by_token(model: Any) -> None:
    """Reserve the first CODE hidden elements for the embeddings, and let routers see only these."""
    for name, parameter in model.named_parameters():
        part = name.removesuffix(".weight").removesuffix(".bias")
        if part.endswith((".o_proj", ".down_proj")):
            side = parameter.data if parameter.dim() < 3 else parameter.data.transpose(0, 1)
            side[:CODE] = 0
        elif part.endswith(".gate"):
            parameter.data[:, CODE:] = 0
            parameter.data *= (parameter.shape[1] / CODE) ** 0.5


@contextmanager
def routes(model: Any, noise: float = 0.0) -> Iterator[list[torch.Tensor]]:
    """Records, inside the block, the experts of every token, sorted, per call of a mixture layer."""
    seen: list[torch.Tensor] = []

    def note(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[1].sort(-1).values.flatten(0, -2))

    def shake(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0] * (1 + noise * torch.randn_like(args[0])), *args[1:])

    named = list(model.named_modules())
    hooks = [part.register_forward_pre_hook(note) for name, part in named if name.endswith(".experts")]
    if noise:
        hooks += [part.register_forward_pre_hook(shake) for name, part in named if name.endswith(".gate")]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def moved_tokens(exact: Any, rough: Any, ours: LoadedModel, parts: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """Returns the number of tokens, and the ids that transformers' bf16 or our hidden states route differently."""
    loose: list[int] = []
    for part in parts:
        found = []
        for model in (exact, rough):
            with routes(model) as seen:
                their_logits(model, part, 1)
            found.append(torch.stack(seen))
        with our_routes(ours.model) as seen:
            ours.all_logits(part, last=1)
        found.append(torch.stack(seen))
        moved = ((found[0] != found[1]) | (found[0] != found[2])).any(2).any(0)
        loose += np.array(part)[moved.cpu().numpy()].tolist()
    return sum(map(len, parts)), loose


@contextmanager
def our_routes(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The same as `routes`, by the reference of op moe.route on our layers' inputs, for any kernel."""
    seen: list[torch.Tensor] = []

    def note(layer: MoE, args: tuple[torch.Tensor, Any]) -> None:
        x, weight, bias = args[0], layer.gate.weight, layer.gate.e_score_correction_bias
        shape = {**moe.shape_of(layer.route), "bias": bias is not None, "size": x.shape[-1]}
        context = OpContext(
            op="moe.route", device=DeviceInfo("cpu"), dtype="bf16", layout="token", granule=1, bucket=4, shape=shape
        )
        _, experts = moe_route.Route(context)(x, weight, bias)
        seen.append(experts.long().sort(-1).values)

    hooks = [part.register_forward_pre_hook(note) for part in model.modules() if isinstance(part, MoE)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def steady_tokens(exact: Any, rough: Any, draw: np.random.Generator) -> np.ndarray[Any, Any]:
    """Returns ids whose experts are the same in every layer in bf16, and when the routers' inputs are a little off."""
    vocab = exact.config.vocab_size
    firm = np.ones(vocab, bool)
    for seed in range(TRIES):
        torch.manual_seed(seed)
        ids = draw.permutation(vocab)
        found = []
        for model, noise in ((exact, 0.0), (exact, NOISE), (rough, 0.0)):
            with routes(model, noise) as seen:
                their_logits(model, ids.tolist(), 1)
            found.append(seen)
        for plain, shaken, rounded in zip(*found, strict=True):
            firm[ids[((plain != shaken) | (plain != rounded)).any(1).cpu().numpy()]] = False
    if firm.sum() < CODE:
        raise SystemExit(f"{type(exact).__name__}: the routes of {firm.sum()} of {vocab} tokens are firm; too few")
    return np.flatnonzero(firm)


# --- the run ---------------------------------------------------------------------------------------------------


def in_this_process(names: Sequence[str], options: argparse.Namespace) -> bool:
    """Prints every config of the families. Returns True if all are good."""
    good = True
    for name, index in cases(names):
        try:
            found = check(name, index, options.device, options.shrink)
        except Exception:  # noqa: BLE001 - the other configs are worth knowing
            print(f"{name} {index}: FAILED\n{traceback.format_exc()}", flush=True)
            good = False
        else:
            print(found.text(), flush=True)
            good &= found.good
    return good


def apart(name: str, options: argparse.Namespace) -> bool:
    """Checks a family in a process of its own. Returns True if it is good."""
    command = [sys.executable, __file__, f"--device={options.device}", f"--shrink={options.shrink}", "--only", name]
    return subprocess.run(command).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shrink", type=int, default=1)
    options = parser.parse_args()
    if options.jobs == 1:
        return 0 if in_this_process(options.only, options) else 1
    with ThreadPoolExecutor(options.jobs) as pool:
        good = list(pool.map(partial(apart, options=options), options.only))
    print(f"{sum(good)} of {len(good)} families are within their limits")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
