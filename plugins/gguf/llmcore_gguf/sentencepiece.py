"""SentencePiece's merging tokenizer (`tokenizer.ggml.model` is `llama`) in terms of the tokenizers library.

SentencePiece repeatedly joins the two neighbours whose joined text is the piece with the best score. A byte-pair
encoder joins the pair that comes first in its list. Both give the same tokens if the list holds every pair that makes
a piece, best pieces first. Spaces are written as U+2581. Characters that no piece covers are spelled in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmcore.api import ConfigError
from tokenizers import Tokenizer, decoders, models, normalizers

from llmcore_gguf.reader import GGUF, NORMAL

SPACE = "\u2581"


def build(file: GGUF) -> Tokenizer:
    """Returns the tokenizer, without the added tokens."""
    texts: Sequence[str] = file.need("tokenizer.ggml.tokens")
    scores: Sequence[float] = file.need("tokenizer.ggml.scores")
    kinds: Sequence[int] = file.need("tokenizer.ggml.token_type")
    if not len(texts) == len(scores) == len(kinds):
        counts = f"{len(texts)} tokens, {len(scores)} scores and {len(kinds)} types"
        raise ConfigError(f"{file.path} has {counts}; it is not a whole model, download another conversion")
    if any(f"<0x{byte:02X}>" not in texts for byte in (0x00, 0xFF)):
        raise ConfigError(f"{file.path} has a SentencePiece tokenizer without bytes; use the model's safetensors")
    prefixed = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    bpe = models.BPE(
        vocab={text: index for index, text in enumerate(texts)},
        merges=merges(texts, scores, kinds),
        unk_token=None if unknown is None else texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def merges(texts: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose joined text is a piece, ordered by that piece's score, best first, then by its id."""
    pieces = {text: index for index, text in enumerate(texts) if kinds[index] == NORMAL}
    pairs: list[tuple[str, str]] = []
    for text in sorted(pieces, key=lambda text: (-scores[pieces[text]], pieces[text])):
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs += [(left, right) for left, right in cuts if left in pieces and right in pieces]
    return pairs
