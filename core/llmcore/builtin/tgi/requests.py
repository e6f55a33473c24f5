"""What TGI's clients send. Names and meaning are TGI's, and so are ranges, except that numbers that
change nothing are taken, and 0 for `top_p`; `truncation_side` is new. null means absent everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from llmcore.api.http import TypedGrammar

MAX_BEST_OF = 8
MAX_STOPS = 32
MAX_TOP = 20
"""Most best tokens per token."""

Flag = bool | None
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)] | None


class Parameters(Struct):
    """`parameters` of a request."""

    best_of: Annotated[int, Meta(ge=1, le=MAX_BEST_OF)] | None = None
    decoder_input_details: Flag = None
    details: Flag = None
    do_sample: Flag = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    max_new_tokens: Count = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    return_full_text: Flag = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=MAX_STOPS)] | None = (
        None
    )
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None
    top_k: Count = None
    top_n_tokens: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    truncate: Count = None
    truncation_side: Literal["left", "right"] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    watermark: Flag = None
    grammar: TypedGrammar | None = None

    adapter_id: Any = None

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn: asked for, or implied by something that only a draw can do."""
        filters = (self.temperature, self.top_p, self.typical_p)
        return bool(self.do_sample or self.top_k) or any(value not in (None, 1.0) for value in filters)


class GenerateRequest(Struct):
    """POST /generate, /generate_stream and /. `stream` counts only at /."""

    inputs: Annotated[str, Meta(min_length=1)]
    parameters: Parameters | None = None
    stream: Flag = None


REFUSED: Mapping[str, tuple[Any, ...]] = {
    "adapter_id": (),
    "watermark": (False,),
}
"""Fields of `parameters` that are refused, with the values beside null that change nothing."""
