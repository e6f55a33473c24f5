"""A front end without a server, for tests of dialects: an echoing bridge and a small tokenizer. No torch."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from llmcore.bridge import ChoiceEvent, Finish, Load, Sink, Submit
from llmcore.config import Config, make_config
from llmcore.errors import RequestError
from llmcore.http.front import Front
from llmcore.protocols import Tokenizer
from llmcore.testing.tokenizer import EOS, write_tokenizer
from llmcore.text.tokenizer import load_tokenizer
from llmcore.wire import ModelFacts, State

FACTS = ModelFacts(
    architecture="Echo",
    vocab_size=300,
    max_input_len=255,
    max_total_len=256,
    kv_tokens=4096,
    max_running=16,
    eos_ids=(EOS,),
)


class EchoBridge:
    """A bridge whose answers repeat the prompt, one token per event, from a thread of its own.

    `submitted` holds every request it took.
    """

    def __init__(self) -> None:
        self.submitted: list[Submit] = []
        self._thread = ThreadPoolExecutor(1, "echo-bridge")
        self._over: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def submit(self, request: Submit, sink: Sink) -> None:
        """Answer with the prompt's tokens, over and over, up to max_new_tokens."""
        prompt = np.frombuffer(request.prompt, "<i4").tolist()
        if len(prompt) + request.max_new_tokens > FACTS.max_total_len:
            raise RequestError("the prompt is too long", code="context_length_exceeded")
        self.submitted.append(request)
        self._thread.submit(self._answer, request, prompt, sink)

    def abort(self, request_id: int) -> None:
        """End every choice."""
        request = next(r for r in self.submitted if r.id == request_id)
        for choice in range(request.n):
            self.finish(request_id, choice, 0)

    def finish(self, request_id: int, choice: int, n_tokens: int) -> None:
        """End one choice."""
        with self._lock:
            self._over.add((request_id, choice))

    def load(self) -> Load:
        """Nothing runs."""
        return Load(kv_free=FACTS.kv_tokens, kv_total=FACTS.kv_tokens)

    def _answer(self, request: Submit, prompt: list[int], sink: Sink) -> None:
        for step in range(request.max_new_tokens):
            finish = Finish.LENGTH if step + 1 == request.max_new_tokens else Finish.RUNNING
            for choice in range(request.n):
                if (request.id, choice) not in self._over:
                    token = prompt[step % len(prompt)]
                    logprobs = (-1.0,) if request.sampling.logprobs is not None else ()
                    sink(ChoiceEvent(choice=choice, tokens=(token,), finish=finish, logprobs=logprobs))


def fake_front(config: Config | None = None, tokenizer: Tokenizer | None = None) -> Front:
    """A front over an EchoBridge; the model is called "echo"."""
    if tokenizer is None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = load_tokenizer(write_tokenizer(Path(folder)))
    return Front(
        config=config or make_config(model_name="echo"),
        bridge=EchoBridge(),
        tokenizer=tokenizer,
        facts=FACTS,
        state=lambda: State(ready=True),
    )
