"""step_outputs: what the device remembers of the running requests, brought up to date after a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmcore.ops import SAMPLE_TOKENS, Op, Shape, size
from llmcore.ops.step_inputs import LENGTH, State, draw_state
from llmcore.specs import OpContext

TOLERANCE = {"f32": 0.0, "f16": 0.0, "bf16": 0.0}

VOCABULARY = 1000
"""Of the samples."""


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

    Returns [S] what the host reads: each token, or -1 where it is none: its row was not `finite`, or it is outside 0
    to `vocabulary` - 1.

    `computed` grows by `n_query` [R] for each row's `request` [R]. Each of `tokens` [S] (0 in place of one that is
    none: the next step reads it before the host can end its request) goes to the end of its request's history,
    `sample_request` [S], which becomes one longer; a history that is full loses its last token instead. Requests are
    distinct, but for rows (of no tokens) and samples that only fill a captured step up: all of those may name one
    request that nobody reads, any of them may win, and its length stays within L.
    """
    history, lengths, computed = state
    computed[request] = computed[request] + n_query
    at = lengths[sample_request].clamp(max=history.shape[1] - 1)
    fine = finite & (tokens == tokens.clamp(0, vocabulary - 1))
    read = torch.where(fine, tokens, -1)
    history[sample_request, at] = read.clamp(min=0)
    lengths[sample_request] = at + 1
    return read


def make(context: OpContext) -> Op:
    """The reference."""
    return reference


def samples(
    context: OpContext,
) -> Iterator[tuple[State, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """All rows sampled, every other, none; full histories; tokens that are none; filling rows, and filling samples
    of one token."""
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
            finite[-2:] = True  # of filling samples any may win, so they say the same
            state = (history, lengths, computed)
            yield state, rows_of, n_query.int(), sample_request, tokens.int(), finite, VOCABULARY


def cost(shape: Shape) -> tuple[float, float]:
    """Per row: its request, count, token and length read, and two numbers and a token written."""
    return 36.0 * size(shape, "tokens"), 0.0
