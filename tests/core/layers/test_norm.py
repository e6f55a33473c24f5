"""Norms against torch's, alone and fused with a residual."""

from __future__ import annotations

import pytest
import torch
from built import build
from llmcore.layers import LayerNorm, OffsetRMSNorm, RMSNorm, Rows
from llmcore.weights.load import dummy_weights

SIZE, EPS = 8, 1e-5
X, RESIDUAL = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(0))


def weighted(norm: RMSNorm | LayerNorm) -> RMSNorm | LayerNorm:
    for parameter in norm.parameters():
        parameter.copy_(torch.linspace(-1, 2, SIZE))
    return norm


def test_rms_norm_is_torchs() -> None:
    norm = weighted(RMSNorm(build(), SIZE, EPS))
    torch.testing.assert_close(norm(X, Rows(1)), torch.nn.functional.rms_norm(X, (SIZE,), norm.weight, EPS))


def test_an_offset_is_added_once_and_in_f32() -> None:
    norm = weighted(OffsetRMSNorm(build(), SIZE, EPS))
    wanted = torch.nn.functional.rms_norm(X, (SIZE,), norm.weight + 1, EPS)
    norm.finish()
    assert norm.weight.dtype == torch.float32
    torch.testing.assert_close(norm(X, Rows(1)), wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_torchs(bias: bool) -> None:
    norm = weighted(LayerNorm(build(), SIZE, EPS, bias=bias))
    wanted = torch.nn.functional.layer_norm(X, (SIZE,), norm.weight, norm.bias, EPS)
    assert (norm.bias is not None) == bias
    torch.testing.assert_close(norm(X, Rows(1)), wanted)


@pytest.mark.parametrize("kind", [RMSNorm, OffsetRMSNorm, LayerNorm])
def test_the_residual_is_added_first(kind: type[RMSNorm]) -> None:
    norm = weighted(kind(build(), SIZE, EPS))
    normed, total = norm.add(X, RESIDUAL, Rows(1))
    torch.testing.assert_close(total, X + RESIDUAL)
    torch.testing.assert_close(normed, norm(X + RESIDUAL, Rows(1)))
    normed, total = norm.add(X, None, Rows(1))
    assert total is X and torch.equal(normed, norm(X, Rows(1)))


def test_dummy_weights_leave_the_size_as_it_is() -> None:
    norm, offset = RMSNorm(build(), SIZE, EPS), OffsetRMSNorm(build(), SIZE, EPS)
    for one in (norm, offset):
        dummy_weights(one)
        assert torch.equal(one.weight, torch.ones(SIZE))
