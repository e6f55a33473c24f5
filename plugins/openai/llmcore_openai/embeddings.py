"""POST /v1/embeddings, and the routes that compare texts by them: /v1/score and /v1/rerank."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import falcon
import msgspec
import numpy as np
from llmcore.api import ChoiceEvent, RequestError, SamplingParams
from llmcore.api.text import TextRules
from llmcore_server.api import Choice, Front, Generation, Request, Usage, intake, listed, openai_error, pieces
from numpy.typing import NDArray

from llmcore_openai import sampling
from llmcore_openai.embedding_requests import CompareRequest, Document, EmbeddingRequest, Pooled, RerankRequest
from llmcore_openai.pooling import read_pooling
from llmcore_openai.prompts import Prompt, split_prompts

MOST = 2048
"""Texts in one request."""

Vector = NDArray[np.float32]
Answer = Callable[[list[Vector], Usage], dict[str, Any]]
"""Makes the answer's body of the vectors, in the order of the texts."""


class Vectors:
    """What the three resources share: how this model makes a vector of a text."""

    def __init__(self, front: Front):
        self.front = front
        self._pooling = read_pooling(front.config.model.path)

    @property
    def normalize(self) -> bool:
        """Whether vectors have length 1 where a request does not say."""
        return self._pooling.normalize

    def start(
        self,
        req: falcon.Request,
        resp: falcon.Response,
        body: Pooled,
        texts: Sequence[tuple[str, Prompt]],
        answer: Answer,
    ) -> None:
        """Submit `texts`, each with its field; what `answer` makes of them is sent from the bridge's thread."""
        front = self.front
        sampling.check_model(front, body.model)
        intake.refuse(body, {"lora_path": ("", [])})
        kind = self._kind(body)
        if len(texts) > MOST:
            param = texts[0][0]
            raise RequestError(
                f"{param}: one request takes at most {MOST} texts; send several", param=param, code="invalid_value"
            )
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
            raise RequestError(
                "model: this one scores prompts and has no embeddings"
                if facts.scores
                else f"model: {facts.architecture} does not show its hidden states, of which embeddings are made",
                param="model",
                code="unsupported_parameter",
            )
        kind = body.pooling or self._pooling.kind
        if not kind:
            raise RequestError(
                f"model: this server cannot make its embeddings: {self._pooling.missing}; set pooling to last or mean "
                "to get vectors that it was not trained for",
                param="model",
                code="unsupported_parameter",
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
            raise RequestError(
                f"dimensions: this model's vectors have {size}", param="dimensions", code="invalid_value"
            )
        unit = self._vectors.normalize if body.normalize is None else body.normalize
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
            raise RequestError(
                f"text_1: {len(first)} texts go with one text_2 each, and there are {len(second)}; or give one",
                param="text_1",
                code="invalid_value",
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
