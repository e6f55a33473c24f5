"""step_outputs: update the device's state of the running requests after a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, size
from llmcore.ops.step_inputs import LENGTH, State, draw_state

TOLERANCE = {"f32": 0.0, "f16": 0.0, "bf16": 0.0}

VOCABULARY = 1000
"""Vocabulary size in `samples`."""


def reference(
    state: State,
    request: torch.Tensor,
    n_query: torch.Tensor,
    sample_request: torch.Tensor,
    tokens: torch.Tensor,
    finite: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """Changes `state`, (history [N, L], lengths [N], computed [N]) by request index; all int32 but `finite` [S] bool.

    Returns the tokens [S] for the host. A token is -1 if it is invalid: its row is not `finite`, or it is not in 0 to
    `vocabulary` - 1.

    `computed` grows by `n_query` [R] for each row's `request` [R]. Each of `tokens` [S] is appended to the history of
    its request, `sample_request` [S]. An invalid token is stored as 0, because the next step reads it before the host
    can end the request. In a full history the new token replaces the last one.

    Requests are distinct, except for the padding of a captured step: rows without tokens, and samples. All padding may
    name one request that is never read. Any of its samples may win, and its length stays within L.
    """
    history, lengths, computed = state
    computed[request] = computed[request] + n_query
    at = lengths[sample_request].clamp(max=history.shape[1] - 1)
    fine = finite & (tokens == tokens.clamp(0, vocabulary - 1))
    read = torch.where(fine, tokens, -1)
    history[sample_request, at] = read.clamp(min=0)
    lengths[sample_request] = at + 1
    return read


def samples(
    context: OpContext,
) -> Iterator[tuple[State, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """All rows sampled, every second row, and none; full histories; invalid tokens; padding rows and samples."""
    for rows in SAMPLE_TOKENS[context.bucket]:
        for every in (1, 2, rows + 1):
            counts = torch.arange(rows) % 3 + 1
            (history, computed, _), request = draw_state(counts, seed=rows + every)
            lengths = computed.clone()
            lengths[request[:-1].long()] += counts.int()
            lengths[request[0].long()] = LENGTH
            lengths[-1] = LENGTH
            sample_request = torch.cat((request[every - 1 : -1 : every], request[-1:], request[-1:]))
            tokens = torch.arange(len(sample_request)) + 7
            for number, wrong in enumerate((VOCABULARY, -1, (1 << 31) - 1, -VOCABULARY), 2):
                tokens[number::9] = wrong
            tokens[-2:] = 5
            n_query = torch.cat((counts, torch.zeros(2, dtype=torch.int64)))
            rows_of = torch.cat((request, request[-1:]))
            finite = torch.arange(len(tokens)) % 4 != 1
            finite[-2:] = True  # Either padding sample may win, so both have the same values.
            state = (history, lengths, computed)
            yield state, rows_of, n_query.int(), sample_request, tokens.int(), finite, VOCABULARY


def cost(shape: Shape) -> tuple[float, float]:
    """For each row, request, count, token and length are read; two numbers and a token are written."""
    return 36.0 * size(shape, "tokens"), 0.0
