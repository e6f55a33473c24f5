"""A source of tokenizers: a model directory with an empty file `bytes.tokenizer` gets a tokenizer of bytes."""

from pathlib import Path

from llmcore.api import RequestError, TokenizerSpec, hookimpl


@hookimpl
def register_tokenizers():
    yield TokenizerSpec(name="bytes", sniff=f"{__name__}:sniff", load=f"{__name__}:ByteTokenizer")


def sniff(path: Path) -> bool:
    """Must be cheap. It looks for the file and reads nothing."""
    return (path / "bytes.tokenizer").is_file()


class ByteTokenizer:
    """protocols.Tokenizer. Ids 0 to 255 are bytes, and 256 ends an answer."""

    vocab_size = 257
    eos_ids = (256,)
    special_ids = frozenset({256})

    def __init__(self, path: Path):
        self.path = path

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def decode(self, ids, *, skip_special_tokens=True):
        end = "" if skip_special_tokens else "<end>"
        text = b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")
        return text + end * list(ids).count(256)

    def token(self, token_id):
        return "<end>" if token_id == 256 else chr(token_id)

    def token_bytes(self, token_id):
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"{token_id} is no token id", code="invalid_value")
        return b"" if token_id == 256 else bytes([token_id])

    def chat(self, messages, /, **variables):
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)
