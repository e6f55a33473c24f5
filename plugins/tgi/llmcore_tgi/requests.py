"""Requests of TGI's clients. Names and meaning are TGI's, and so are ranges, except that numbers that
change nothing are taken, and 0 for `top_p`; `truncation_side` is new. null means absent everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from llmcore_server.api import TypedGrammar
from msgspec import Meta, Struct

MAX_BEST_OF = 8
MAX_STOPS = 32
MAX_TOP = 20
"""Most best tokens per token."""

Flag = bool | None
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)] | None


class Parameters(Struct):
    """`parameters` of a request."""

    best_of: Annotated[int, Meta(ge=1, le=MAX_BEST_OF)] | None = None
    """The number of answers to draw, of which the one with the highest log-probability per token is returned."""
    decoder_input_details: Flag = None
    """List the prompt's tokens with their log-probabilities. A stream does not take it."""
    details: Flag = None
    """List the tokens of the answer."""
    do_sample: Flag = None
    """Draw tokens. Absent: only if another field implies it."""
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    """Taken from a token's score once for each time that prompt and answer have it."""
    max_new_tokens: Count = None
    """The most tokens that an answer may have. Absent: the rest of the context."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    """Divides the scores of tokens of the prompt and the answer; 1 changes nothing."""
    return_full_text: Flag = None
    """Put the prompt before the answer."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Equal requests with equal seeds get equal answers; absent: one is drawn."""
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=MAX_STOPS)] | None = (
        None
    )
    """Texts at which an answer ends. The answer shows them."""
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None
    """The temperature at which tokens are drawn. Absent: 1."""
    top_k: Count = None
    """Draw from this number of the likeliest tokens. Absent: from all."""
    top_n_tokens: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    """The number of the likeliest tokens to list in the place of each."""
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Draw from the likeliest tokens that have this share of the probability; 0 is greedy. Absent: 1."""
    truncate: Count = None
    """The number of the prompt's tokens to keep. Absent: all."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that truncate cuts: left keeps the end of the prompt, right its beginning. Absent: left."""
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Draw from the tokens whose surprise is nearest to the expected one and that have this share of the
    probability; 1 for all."""
    watermark: Flag = None
    """Refused, except false: this server does not have it."""
    grammar: TypedGrammar | None = None
    """The form of the answer."""

    adapter_id: Any = None
    """Refused: this server does not load adapters."""

    @property
    def sampled(self) -> bool:
        """True if tokens are drawn, because the client says so or sets a field that only matters in draws."""
        filters = (self.temperature, self.top_p, self.typical_p)
        return bool(self.do_sample or self.top_k) or any(value not in (None, 1.0) for value in filters)


class GenerateRequest(Struct):
    """POST /generate, /generate_stream and /. `stream` counts only at /."""

    inputs: Annotated[str, Meta(min_length=1)]
    """The prompt."""
    parameters: Parameters | None = None
    """The parameters of the generation."""
    stream: Flag = None
    """At / only: send the answer as server-sent events while it is generated."""


REFUSED: Mapping[str, tuple[Any, ...]] = {
    "adapter_id": (),
    "watermark": (False,),
}
"""Fields of `parameters` that are refused, with the values beside null that change nothing."""
