"""What clients of embeddings send, and of the two routes that compare them; see requests.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from llmcore.builtin.openai.requests import Flag, Priority, Side, Text, TokenId

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=2048)]


class Pooled(Struct, kw_only=True):
    """What all three take."""

    model: Text | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Side = None
    add_special_tokens: Flag = None
    pooling: Literal["last", "mean"] | None = None
    cache_salt: Text | None = None
    priority: Priority = None
    lora_path: Any = None


class EmbeddingRequest(Pooled, kw_only=True):
    """POST /v1/embeddings. `input`: a text, token ids, or a list of either; `pooling` and `normalize` are ours."""

    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1, max_length=2**20)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    normalize: Flag = None


class CompareRequest(Pooled, kw_only=True):
    """POST /v1/score: one text against one or many, or many against as many."""

    text_1: Texts
    text_2: Texts


class Document(Struct):
    """A document as an object."""

    text: str


class RerankRequest(Pooled, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=2048)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: Flag = None
    max_tokens_per_doc: Any = None
    rank_fields: Any = None
