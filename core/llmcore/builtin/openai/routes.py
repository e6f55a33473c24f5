"""The routes of the OpenAI dialect."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api.http import Front, Route
from llmcore.builtin.openai.chat import ChatCompletions
from llmcore.builtin.openai.completions import Completions
from llmcore.builtin.openai.models import Model, Models
from llmcore.builtin.openai.requests import ChatRequest, CompletionRequest


def routes(front: Front) -> Iterable[Route]:
    """One resource per path."""
    models = Models(front)
    yield Route("/v1/models", models)
    yield Route("/v1/models/{model:path}", Model(front, models))
    yield Route("/v1/chat/completions", ChatCompletions(front), body=ChatRequest)
    yield Route("/v1/completions", Completions(front), body=CompletionRequest)
