"""A model's tokenizer.model, read by the `sentencepiece` package.

Some special tokens are not in tokenizer.model: they were added later, with ids after its last one. They come from
tokenizer_config.json, and `encode` cuts them out of the text first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcore.api import ConfigError, RequestError
from llmcore.api.text import ChatTemplate, Companions, read_companions
from sentencepiece import SentencePieceProcessor


class SentencePieceTokenizer:
    """A `protocols.Tokenizer` with a SentencePiece model."""

    def __init__(self, processor: Any, companions: Companions):
        self._processor = processor
        self._added = {
            str(token["content"]): int(token_id)
            for token_id, token in companions.settings.get("added_tokens_decoder", {}).items()
        }
        self._names = {token_id: text for text, token_id in self._added.items()}
        self._cut = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or r"(?!)")
        self._size: int = processor.get_piece_size()
        self.vocab_size = max([self._size, *(token_id + 1 for token_id in self._names)])
        self.special_ids = frozenset(self._names) | {i for i in range(self._size) if processor.is_control(i)}
        self.eos_ids = companions.eos_ids or self._eos(companions)
        self._adds_bos = bool(companions.settings.get("add_bos_token", True)) and processor.bos_id() >= 0
        self.template = ChatTemplate(companions.templates, companions.tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. `add_special_tokens` puts the BOS first, unless the model's config says otherwise."""
        ids = [self._processor.bos_id()] if add_special_tokens and self._adds_bos else []
        at = 0
        for match in self._cut.finditer(text):
            ids += self._processor.encode(text[at : match.start()])
            ids.append(self._added[match[0]])
            at = match.end()
        return ids + list(self._processor.encode(text[at:]))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        parts: list[str] = []
        pending: list[int] = []
        for token_id in ids:
            self._check(token_id)
            if token_id not in self.special_ids:
                pending.append(token_id)
            elif not skip_special_tokens:
                parts += [self._processor.decode(pending), self.token(token_id)]
                pending = []
        return "".join([*parts, self._processor.decode(pending)])

    def token(self, token_id: int) -> str:
        """The vocabulary's string for an id."""
        self._check(token_id)
        if token_id in self._names:
            return self._names[token_id]
        return str(self._processor.id_to_piece(token_id)) if token_id < self._size else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id."""
        text = self.token(token_id)
        if token_id < self._size and self._processor.is_byte(token_id):
            return bytes([int(text[3:-1], 16)])
        return text.replace("▁", " ").encode("utf-8", "replace")

    def chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """The prompt that the chat template renders."""
        return self.template.render(messages, **variables)

    def _eos(self, companions: Companions) -> tuple[int, ...]:
        named = self._added.get(companions.tokens.get("eos_token", ""))
        if named is not None:
            return (named,)
        return (self._processor.eos_id(),) if self._processor.eos_id() >= 0 else ()

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is not in the vocabulary; ids are 0 to {self.vocab_size - 1}")


def has_tokenizer_model(model: Path) -> bool:
    """TokenizerSpec.sniff: True if the directory has a tokenizer.model."""
    return (model / "tokenizer.model").is_file()


def load_tokenizer(directory: Path) -> SentencePieceTokenizer:
    """TokenizerSpec.load. Raises ConfigError if the file is broken."""
    processor = SentencePieceProcessor()
    try:
        processor.Load(str(directory / "tokenizer.model"))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"tokenizer.model cannot be loaded ({error}); download the model again") from error
    return SentencePieceTokenizer(processor, read_companions(directory))
