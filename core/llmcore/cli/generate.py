"""`llmcore generate`: a file of prompts in, a file of answers out, without a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import click

from llmcore.api.errors import ConfigError
from llmcore.cli.display import Stages
from llmcore.cli.options import Resolved, SettingsCommand, given, sampling_options, with_model

if TYPE_CHECKING:
    from llmcore.engine.llm import LLM, Generated

Progress = Callable[[str, int, int], None]
"""(stage, prompts done, prompts in all) -> None."""

MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Item:
    """One line of the input: its fields, and a prompt or a conversation to answer."""

    fields: dict[str, Any]
    prompt: str | None
    messages: Sequence[dict[str, Any]] = ()


@click.command(cls=SettingsCommand, groups=("model", "memory", "scheduling", "kernels", "plugins", "plugin_options"))
@click.argument("prompts", type=click.File(encoding="utf-8"))
@click.option("--output", type=click.File("w", encoding="utf-8", lazy=True), default="-", help="Where answers go.")
@click.option("--chat", is_flag=True, help="Every line is a message: use the model's chat template.")
@sampling_options
@click.pass_context
def command(
    ctx: click.Context, /, resolved: Resolved, prompts: IO[str], output: IO[str], chat: bool, **sampling: Any
) -> None:
    """Answer a file of prompts, offline.

    PROMPTS has one prompt per line, or is JSONL: objects with "prompt" or "messages"; `-` reads standard input.
    Answers are JSONL in the same order, each with the fields of its line. The default is greedy.
    """
    items = list(read_items(prompts, chat))
    config = with_model(resolved.config, None)
    options = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0.0, **given(sampling)}
    loading, answering = Stages(), Stages(unit="prompts")
    try:
        from llmcore.engine.llm import LLM

        with LLM.from_config(config, progress=loading.update) as llm:
            loading.close()
            rows = answer(llm, items, options, answering.update)
    finally:
        loading.close()
        answering.close()
    for row in rows:
        output.write(json.dumps(row, ensure_ascii=False) + "\n")
    ctx.exit(1 if any("error" in row for row in rows) else 0)


def read_items(lines: IO[str], chat: bool) -> Iterator[Item]:
    """The prompts of a file. Raises ConfigError that names the first wrong line."""
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\n")
        if not text.strip():
            continue
        if not text.lstrip().startswith("{"):
            yield _item({"prompt": text}, chat)
            continue
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{lines.name}, line {number} is not JSON: {error}") from error
        if isinstance(fields.get("prompt"), str) == isinstance(fields.get("messages"), list):
            raise ConfigError(f'{lines.name}, line {number}: give "prompt", a text, or "messages", a list.')
        yield _item(fields, chat)


def answer(llm: LLM, items: Sequence[Item], options: dict[str, Any], progress: Progress) -> list[dict[str, Any]]:
    """Every item's row. A prompt that leaves no room for an answer gets an `error` and does not stop the others."""
    ids = [_ids(llm, item) for item in items]
    total = llm.facts.max_total_len
    longest = min(llm.facts.max_input_len, total - 1)
    fitting = {index for index, prompt in enumerate(ids) if 0 < len(prompt) <= longest}
    tight = {index for index in fitting if len(ids[index]) + options["max_new_tokens"] > total}
    rows = [
        {**item.fields, "error": f"the prompt has {len(prompt)} tokens, it may have 1 to {longest}"}
        for item, prompt in zip(items, ids, strict=True)
    ]
    for stage, group, most in (
        ("prompts", fitting - tight, options["max_new_tokens"]),
        ("long ones", tight, None),
    ):
        order = sorted(group)
        prompts = [ids[index] for index in order]
        done = partial(progress, stage)
        answers = llm.generate(prompts, progress=done, **{**options, "max_new_tokens": most}) if prompts else []
        for index, got in zip(order, answers, strict=True):
            rows[index] = {**items[index].fields, **_row(got)}
    return rows


def _row(got: Generated) -> dict[str, Any]:
    return {
        "text": got.text,
        "finish_reason": got.finish_reason,
        "prompt_tokens": len(got.prompt_ids),
        "cached_tokens": got.cached_tokens,
        "output_tokens": len(got.token_ids),
    }


def _item(fields: dict[str, Any], chat: bool) -> Item:
    prompt = fields.get("prompt")
    if chat and prompt is not None:
        return Item(fields, None, [{"role": "user", "content": prompt}])
    return Item(fields, prompt, fields.get("messages", ()))


def _ids(llm: LLM, item: Item) -> list[int]:
    if item.prompt is not None:
        return llm.tokenizer.encode(item.prompt)
    return llm.tokenizer.encode(
        llm.tokenizer.chat(item.messages, add_generation_prompt=True), add_special_tokens=False
    )
