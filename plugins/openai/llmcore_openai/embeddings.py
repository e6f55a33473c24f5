"""POST /v1/embeddings, the routes that compare texts by them, /v1/score and /v1/rerank, and how a model pools."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import falcon
import msgspec
import numpy as np
import orjson
from llmcore.api import ChoiceEvent, ConfigError, RequestError, SamplingParams
from llmcore.api.text import TextRules
from llmcore_server.api import Choice, Front, Generation, Request, Usage, intake, listed, openai_error, pieces, refusal
from msgspec import Meta, Struct
from numpy.typing import NDArray

from llmcore_openai import sampling
from llmcore_openai.completions import Prompt, split_prompts
from llmcore_openai.requests import Flag, Priority, Side, Text, TokenId

MOST = 2048
"""Texts in one request."""

Vector = NDArray[np.float32]
Answer = Callable[[list[Vector], Usage], dict[str, Any]]
"""Makes the answer's body of the vectors, in the order of the texts."""


class Vectors:
    """The shared part of the three resources: it makes vectors of texts, as this model is meant to."""

    def __init__(self, front: Front):
        self.front = front
        self.pooling = read_pooling(front.config.model.path)

    def start(
        self,
        req: falcon.Request,
        resp: falcon.Response,
        body: Pooled,
        texts: Sequence[tuple[str, Prompt]],
        answer: Answer,
    ) -> None:
        """Submit `texts`, each with its field. The bridge's thread sends what `answer` makes of their vectors."""
        front = self.front
        sampling.check_model(front, body.model)
        intake.refuse(body, {"lora_path": ("", [])})
        kind = self._kind(body)
        if len(texts) > MOST:
            param = texts[0][0]
            raise refusal(param, f"one request takes at most {MOST} texts; send several")
        submits = []
        for param, text in texts:
            ids = sampling.prompt_ids(
                front,
                text,
                body,
                param=param,
                special=body.add_special_tokens is not False,
                most=1,
            )
            salt = intake.salt(body.cache_salt)
            greedy = SamplingParams(temperature=0.0)
            submit = intake.submit(front, ids, greedy, max_new_tokens=1, cache_salt=salt, priority=body.priority)
            submits.append(msgspec.structs.replace(submit, pool=kind))
        request = Request(submits=submits, rules=TextRules(), dialect="openai", request_id=front.request_id(req))
        generation = Generation(front, front.detach(req, resp), request)
        generation.start(VectorWriter(generation, answer))

    def _kind(self, body: Pooled) -> str:
        """Of which tokens; what a request says counts more than the checkpoint. Raises RequestError."""
        facts = self.front.facts
        if facts.scores or not facts.embedding_size:
            raise refusal(
                "model",
                "this one scores prompts and has no embeddings"
                if facts.scores
                else f"model: {facts.architecture} does not show its hidden states, of which embeddings are made",
                "unsupported_parameter",
            )
        kind = body.pooling or self.pooling.kind
        if not kind:
            raise refusal(
                "model",
                f"this server cannot make its embeddings: {self.pooling.missing}; set pooling to last or mean "
                "to get vectors that it was not trained for",
                "unsupported_parameter",
            )
        return kind


class VectorWriter:
    """Collects vectors and answers once."""

    def __init__(self, generation: Generation, answer: Answer):
        self._generation = generation
        self._answer = answer
        self._vectors = [np.empty(0, np.float32) for _ in generation.choices]

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """Collect."""
        if event.pooled:
            self._vectors[choice.index] = np.frombuffer(event.pooled, "<f4")

    def done(self) -> None:
        """Answer."""
        if not all(vector.size and np.isfinite(vector).all() for vector in self._vectors):
            error = RequestError(
                "the model's output for this request was not finite; if many requests fail like this, check the "
                "weights for NaN and Inf (docs/operators.md, Errors, says how)",
                code="internal_error",
                status=500,
            )
            self.failed(error)
            return
        body = self._answer(self._vectors, self._generation.usage())
        self._generation.reply.respond_in_pieces(pieces(body))

    def failed(self, error: RequestError) -> None:
        """Answer with the error."""
        self._generation.fail(error, openai_error)


class Embeddings:
    """The resource of /v1/embeddings."""

    def __init__(self, vectors: Vectors):
        self._vectors = vectors

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """A vector for every input."""
        front = self._vectors.front
        body = front.read(req, EmbeddingRequest)
        size = front.facts.embedding_size
        if body.dimensions is not None and size and body.dimensions > size:
            raise refusal("dimensions", f"this model's vectors have {size}")
        unit = self._vectors.pooling.normalize if body.normalize is None else body.normalize
        encode = _base64 if body.encoding_format == "base64" else _floats

        def answer(vectors: list[Vector], usage: Usage) -> dict[str, Any]:
            shown = [vector[: body.dimensions] for vector in vectors]
            return {
                "object": "list",
                "data": listed(
                    {"object": "embedding", "index": i, "embedding": encode(normalized(vector) if unit else vector)}
                    for i, vector in enumerate(shown)
                ),
                "model": front.model_name,
                "usage": _usage(usage),
            }

        texts = [("input", text) for text in split_prompts(front, body.input, param="input")]
        self._vectors.start(req, resp, body, texts, answer)


class Scores:
    """The resource of /v1/score: how near texts are to each other, as the cosine of their vectors."""

    def __init__(self, vectors: Vectors):
        self._vectors = vectors

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """A number for every pair."""
        front = self._vectors.front
        body = front.read(req, CompareRequest)
        first, second = intake.as_list(body.text_1), intake.as_list(body.text_2)
        if len(first) not in (1, len(second)):
            raise refusal(
                "text_1", f"{len(first)} texts go with one text_2 each, and there are {len(second)}; or give one"
            )

        def answer(vectors: list[Vector], usage: Usage) -> dict[str, Any]:
            left, right = vectors[: len(first)], vectors[len(first) :]
            pairs = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
            return {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": front.model_name,
                "data": [
                    {"index": i, "object": "score", "score": cosine(one, other)}
                    for i, (one, other) in enumerate(pairs)
                ],
                "usage": _usage(usage),
            }

        texts = [*(("text_1", text) for text in first), *(("text_2", text) for text in second)]
        self._vectors.start(req, resp, body, texts, answer)


class Rerank:
    """The resource of /v1/rerank: documents, the nearest to a query first."""

    def __init__(self, vectors: Vectors):
        self._vectors = vectors

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """The best `top_n` documents."""
        front = self._vectors.front
        body = front.read(req, RerankRequest)
        intake.refuse(body, {"max_tokens_per_doc": (), "rank_fields": ([],)})
        documents = [one.text if isinstance(one, Document) else one for one in body.documents]

        def answer(vectors: list[Vector], usage: Usage) -> dict[str, Any]:
            near = [cosine(vectors[0], vector) for vector in vectors[1:]]
            order = sorted(range(len(near)), key=lambda i: -near[i])[: body.top_n or None]
            shown = body.return_documents is not False
            return {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": front.model_name,
                "usage": _usage(usage),
                "results": [
                    {"index": i, **({"document": {"text": documents[i]}} if shown else {}), "relevance_score": near[i]}
                    for i in order
                ],
            }

        texts = [("query", body.query), *((f"documents[{i}]", text) for i, text in enumerate(documents))]
        self._vectors.start(req, resp, body, texts, answer)


def normalized(vector: Vector) -> Vector:
    """`vector` with length 1; one of zeros stays as it is."""
    length = np.linalg.norm(vector)
    return vector / length if length else vector


def cosine(one: Vector, other: Vector) -> float:
    """-1 to 1."""
    return float(normalized(one) @ normalized(other))


def _floats(vector: Vector) -> list[float]:
    floats: list[float] = vector.tolist()
    return floats


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=2048)]


class Pooled(Struct, kw_only=True):
    """The fields that all three requests have."""

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


_KINDS = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}


@dataclass(frozen=True)
class Pooling:
    """`kind`: last or mean; "" with the reason in `missing` where this server cannot do what the checkpoint says.

    `normalize`: whether vectors get length 1 where a request does not say.
    """

    kind: str = "last"
    normalize: bool = True
    missing: str = ""


def read_pooling(model: Path) -> Pooling:
    """The pooling of a checkpoint, from `modules.json` and the file of its pooling module; else the last token's.

    Raises ConfigError for files that cannot be read.
    """
    listed = _read(model / "modules.json")
    modules = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    kinds = {str(one.get("type", "")).rpartition(".")[2]: str(one.get("path", "")) for one in modules}
    beyond = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if beyond:
        return Pooling(kind="", missing=f"its vectors go through {beyond[0]}, which this server does not have")
    normalize = not modules or "Normalize" in kinds
    found = _read(model / kinds.get("Pooling", "1_Pooling") / "config.json")
    return _pooling(found, normalize) if isinstance(found, dict) else Pooling(normalize=normalize)


def _pooling(described: Mapping[str, Any], normalize: bool) -> Pooling:
    named = described.get("pooling_mode")
    asked = (
        [named]
        if isinstance(named, str)
        else [
            name.removeprefix("pooling_mode_")
            for name, on in described.items()
            if name.startswith("pooling_mode_") and on
        ]
    )
    if len(asked) == 1 and asked[0] in _KINDS:
        return Pooling(_KINDS[asked[0]], normalize)
    what = " and ".join(map(str, asked)) or "nothing"
    return Pooling(kind="", missing=f"it pools {what}, and this server the last token or the mean")


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path.name} of the model cannot be read ({error}); download the model again") from error
