"""A byte tokenizer for a model directory without a tokenizer, for `--load_format dummy`."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_stand_in(out: Path) -> Path:
    """Write a tokenizer with one id per byte, 0 to 255, and a plain chat template to directory `out` and return it."""
    out.mkdir(parents=True, exist_ok=True)
    bytes_as_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(bytes_as_text)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return out
