"""`llmcore generate`: a file of prompts in, a file of answers out, without a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import click

from llmcore.api.errors import ConfigError
from llmcore.cli.display import Stages
from llmcore.cli.options import Resolved, SettingsCommand, given, sampling_options

if TYPE_CHECKING:
    from llmcore.engine.llm import LLM, Generated

Progress = Callable[[str, int, int], None]
"""(stage, prompts done, prompts in all) -> None."""

MAX_NEW_TOKENS = 256


Item = dict[str, Any]
"""The fields of one line of the input: `prompt` or `messages`, and what else the line holds."""


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
    try:
        items = list(read_items(prompts))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{prompts.name} is not a text; give one prompt per line, or JSONL") from error
    options = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0.0, **given(sampling)}
    with closing(Stages()) as loading, closing(Stages(unit="prompts")) as answering:
        from llmcore.engine.llm import LLM

        with LLM.from_config(resolved.config, progress=loading.update) as llm:
            loading.close()
            rows = answer(llm, items, chat, options, answering.update)
    for row in rows:
        output.write(json.dumps(row, ensure_ascii=False) + "\n")
    ctx.exit(1 if any("error" in row for row in rows) else 0)


def read_items(lines: IO[str]) -> Iterator[Item]:
    """The prompts of a file. Raises ConfigError that names the first wrong line."""
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\n")
        if not text.strip():
            continue
        if not text.lstrip().startswith("{"):
            yield {"prompt": text}
            continue
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{lines.name}, line {number} is not JSON: {error}") from error
        if isinstance(fields.get("prompt"), str) == isinstance(fields.get("messages"), list):
            raise ConfigError(f'{lines.name}, line {number}: give "prompt", a text, or "messages", a list.')
        yield fields


def answer(
    llm: LLM, items: Sequence[Item], chat: bool, options: dict[str, Any], progress: Progress
) -> list[dict[str, Any]]:
    """Every item's row. A prompt that leaves no room for an answer gets an `error` and does not stop the others."""
    ids = [_ids(llm, item, chat) for item in items]
    total = llm.facts.max_total_len
    longest = min(llm.facts.max_input_len, total - 1)
    fitting = [index for index, prompt in enumerate(ids) if 0 < len(prompt) <= longest]
    most = options["max_new_tokens"]
    tight = [index for index in fitting if len(ids[index]) + most > total]
    roomy = [index for index in fitting if len(ids[index]) + most <= total]
    rows = [
        {**item, "error": f"the prompt has {len(prompt)} tokens, it may have 1 to {longest}"}
        for item, prompt in zip(items, ids, strict=True)
    ]
    for stage, group, limit in (("prompts", roomy, most), ("long ones", tight, None)):
        prompts = [ids[index] for index in group]
        answers = llm.generate(prompts, progress=partial(progress, stage), **{**options, "max_new_tokens": limit})
        for index, got in zip(group, answers, strict=True):
            rows[index] = {**items[index], **_row(got)}
    return rows


def _row(got: Generated) -> dict[str, Any]:
    return {
        "text": got.text,
        "finish_reason": got.finish_reason,
        "prompt_tokens": len(got.prompt_ids),
        "cached_tokens": got.cached_tokens,
        "output_tokens": len(got.token_ids),
    }


def _ids(llm: LLM, item: Item, chat: bool) -> list[int]:
    prompt = item.get("prompt")
    if isinstance(prompt, str) and not chat:
        return llm.tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else item["messages"]
    text = llm.tokenizer.chat(messages, add_generation_prompt=True)
    return llm.tokenizer.encode(text, add_special_tokens=False)
