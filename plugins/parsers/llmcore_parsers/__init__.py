"""Parsers of models' output, one notation per file. Some have two names: LightLLM's and LMDeploy's."""

from collections.abc import Iterable

from llmcore.api import OutputParserSpec, hookimpl


@hookimpl
def register_output_parsers() -> Iterable[OutputParserSpec]:
    """Tool calls as Qwen and Hermes write them; reasoning between think tags."""
    for name in ("qwen25", "qwen"):
        yield OutputParserSpec(
            name=name,
            kind="tool",
            make=f"{__name__}.qwen:QwenToolParser",
            special_tokens=("<tool_call>", "</tool_call>"),
            samples=f"{__name__}.qwen:samples",
            summary="<tool_call>{JSON}</tool_call>: Qwen 2.5 and 3, Hermes",
        )
    for name in ("deepseek_r1", "deepseek-r1", "qwen3"):
        yield OutputParserSpec(
            name=name,
            kind="reasoning",
            make=f"{__name__}.think:ThinkParser",
            special_tokens=("<think>", "</think>"),
            samples=f"{__name__}.think:samples",
            summary="<think>...</think>: DeepSeek R1, QwQ, Qwen 3",
        )
