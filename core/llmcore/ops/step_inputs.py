"""step_inputs: find a step's new tokens in the device's state of the running requests."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, size

TOLERANCE = {"f32": 0.0, "f16": 0.0, "bf16": 0.0}

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

LENGTH = 24
"""Most tokens of a request in `samples`."""


def reference(
    state: State, request: torch.Tensor, n_query: torch.Tensor, row: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For T tokens in R rows: (tokens [T] int64, positions [T], owner [T], prompt_len [T], kv_len [R]), else int32.

    `state`: (history [N, L], computed [N], prompt_len [N]) by request index. Row r belongs to request `request[r]` and
    has `n_query[r]` tokens. Token t is token number `offset[t]` of row `row[t]`. All inputs are int32. Padding tokens
    of a captured step name a row whose request is never read.
    """
    history, computed, prompt_len = state
    owner = request[row]
    positions = computed[owner] + offset
    return history[owner, positions].long(), positions, owner, prompt_len[owner], computed[request] + n_query


def samples(
    context: OpContext,
) -> Iterator[tuple[State, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows of one token, rows of several tokens, and a padding row. Ids that must not be read are -1."""
    for tokens in SAMPLE_TOKENS[context.bucket]:
        for most in (1, 5):
            counts = _counts(tokens, most)
            state, request = draw_state(counts, seed=tokens + most)
            row = torch.repeat_interleave(torch.arange(len(counts)), counts)
            offset = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
            # Two padding tokens of the last row.
            row = torch.cat((row, torch.full((2,), len(counts))))
            offset = torch.cat((offset, torch.zeros(2, dtype=torch.int64)))
            counts = torch.cat((counts, torch.zeros(1, dtype=torch.int64)))
            yield state, request, counts.int(), row.int(), offset.int()


def draw_state(counts: torch.Tensor, seed: int) -> tuple[State, torch.Tensor]:
    """A state in which each row has `counts` [R] tokens to compute, and the requests of the rows and a padding row.

    The padding row's request is the last of the tables, and has no computed tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    n = len(counts) + 3
    request = torch.cat((torch.randperm(n - 1, generator=generator)[: len(counts)], torch.tensor([n - 1])))
    computed = torch.randint(LENGTH - int(counts.max()) + 1, (n,), generator=generator)
    computed[-1] = 0
    known = computed.clone()
    known[request[:-1]] += counts
    known[-1] = 1
    history = torch.randint(1 << 20, (n, LENGTH), generator=generator)
    history[torch.arange(LENGTH)[None] >= known[:, None]] = -1
    prompt_len = torch.randint(LENGTH, (n,), generator=generator)
    return (history.int(), computed.int(), prompt_len.int()), request.int()


def _counts(tokens: int, most: int) -> torch.Tensor:
    """Token counts of rows, from 1 to `most`, with the sum `tokens`."""
    full, rest = divmod(tokens, most)
    return torch.tensor([most] * full + [rest] * (rest > 0))


def cost(shape: Shape) -> tuple[float, float]:
    """For each token, its row, offset, request, position, id and prompt length are read, and the results written."""
    return 48.0 * size(shape, "tokens"), 0.0
