"""What clients of embeddings send, and of the two routes that compare them; see requests.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from llmcore_openai.requests import Flag, Priority, Side, Text, TokenId

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=2048)]


class Pooled(Struct, kw_only=True):
    """What all three take."""

    model: Text | None = None
    """The served model, by a name that /v1/models lists. Absent: the served model."""
    user: Annotated[str, Meta(max_length=1024)] | None = None
    """Accepted without effect."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """The number of tokens to keep of each text; -1: all that fit. Absent: all."""
    truncation_side: Side = None
    """The side that truncate_prompt_tokens cuts: left keeps the end of a text, right its beginning. Absent: left."""
    add_special_tokens: Flag = None
    """Put the tokenizer's own tokens around each text. Absent: true."""
    pooling: Literal["last", "mean"] | None = None
    """The tokens that make the vector: the last one, or the mean of all. Absent: as the checkpoint says."""
    cache_salt: Text | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    priority: Priority = None
    """Requests with lower numbers are served earlier, with --scheduler priority; other schedulers refuse all but 0."""
    lora_path: Any = None
    """Refused, except an empty text or list: this server does not load adapters."""


class EmbeddingRequest(Pooled, kw_only=True):
    """POST /v1/embeddings. `input`: a text, token ids, or a list of either; `pooling` and `normalize` are ours."""

    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1, max_length=2**20)]
    """A text, token ids, or several texts of either kind."""
    encoding_format: Literal["float", "base64"] | None = None
    """The form of the numbers: a list, or base64 of little-endian f32. Absent: float."""
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """The number of numbers to keep of each vector, before it gets its length. Absent: all."""
    normalize: Flag = None
    """Give the vectors length 1. Absent: as the checkpoint says, else true."""


class CompareRequest(Pooled, kw_only=True):
    """POST /v1/score: one text against one or many, or many against as many."""

    text_1: Texts
    """One text, or as many as text_2 has."""
    text_2: Texts
    """One text, or several."""


class Document(Struct):
    """A document as an object."""

    text: str
    """The document."""


class RerankRequest(Pooled, kw_only=True):
    """POST /v1/rerank."""

    query: str
    """The text that the documents are compared with."""
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=2048)]
    """The documents, as texts or objects."""
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """The number of the nearest documents to return; 0 or absent: all."""
    return_documents: Flag = None
    """Show the documents in the answer. Absent: true."""
    max_tokens_per_doc: Any = None
    """Refused: truncate_prompt_tokens does this."""
    rank_fields: Any = None
    """Refused, except []: a document has one text."""
