"""LightLLM's native dialect: /generate, /generate_stream and what its clients ask beside them."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import DialectSpec, OptionSpec, hookimpl


@hookimpl
def register_dialects() -> Iterable[DialectSpec]:
    """`/generate`, `/generate_stream`, `/`, `/get_score`, `/tokens`, `/token_load` and `/get_model_name`."""
    yield DialectSpec(name="lightllm", make=f"{__name__}.routes:routes", summary="LightLLM's native HTTP API")


@hookimpl
def register_options() -> Iterable[OptionSpec]:
    """The options of its operators."""
    yield OptionSpec(
        name="beam_mode",
        type=bool,
        default=False,
        summary="At /generate best_of is the number of beams of a beam search; without it num_beams asks for one.",
        serving=True,
    )
    yield OptionSpec(
        name="return_all_prompt_logprobs",
        type=bool,
        default=False,
        summary="Every native answer, streams excepted, brings the prompt's ids and their log-probabilities.",
        serving=True,
    )
    yield OptionSpec(
        name="use_reward_model",
        type=bool,
        default=False,
        summary="The model is a reward model: it serves /get_score.",
        serving=True,
    )
