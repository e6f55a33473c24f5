"""The embedding table and the head: lookup, the factor, tied weights and the soft cap."""

from __future__ import annotations

from dataclasses import replace

import torch
from built import CONFIG, build
from llmcore.layers import CappedHead, Embedding, LMHead, Rows, ScaledEmbedding, create_linears
from llmcore.weights.load import dummy_weights, finish

VOCAB, SIZE = 10, 8
TOKENS = torch.tensor([3, 0, 9, 3])
HIDDEN = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))


def test_a_token_is_its_row() -> None:
    embedding = Embedding(build(), VOCAB, SIZE)
    dummy_weights(embedding)
    assert torch.equal(embedding(TOKENS, Rows(1)), embedding.weight[TOKENS])


def test_the_factor_is_rounded_to_the_models_type() -> None:
    embedding = ScaledEmbedding(build(config=replace(CONFIG, dtype="bf16")), VOCAB, SIZE, 3584**0.5)
    dummy_weights(embedding)
    assert embedding.factor == 59.75  # of 59.866
    assert torch.equal(embedding(TOKENS, Rows(1)), embedding.weight[TOKENS] * 59.75)


def test_a_tied_head_multiplies_with_the_table() -> None:
    made = build()
    embedding = Embedding(made, VOCAB, SIZE)
    head = LMHead(made, SIZE, VOCAB, weight=embedding.weight)
    dummy_weights(embedding)
    create_linears(head)
    finish(head)
    torch.testing.assert_close(head(HIDDEN, Rows(1)), HIDDEN @ embedding.weight.T)


def test_capped_logits_stay_below_the_cap() -> None:
    made = build()
    table = Embedding(made, VOCAB, SIZE)
    dummy_weights(table)
    table.weight.mul_(1000)
    plain_head = LMHead(made, SIZE, VOCAB, weight=table.weight)
    capped_head = CappedHead(made, SIZE, VOCAB, cap=5.0, weight=table.weight)
    for head in (plain_head, capped_head):
        create_linears(head)
        finish(head)
    plain, capped = plain_head(HIDDEN, Rows(1)), capped_head(HIDDEN, Rows(1))
    assert plain.abs().max() > 5 >= capped.abs().max()
    assert capped.dtype == torch.float32
    torch.testing.assert_close(capped, 5 * torch.tanh(plain / 5))
