"""RMSNorm and LayerNorm, alone and fused with the addition of a decoder's residual."""

from __future__ import annotations

import torch
from torch import nn

from llmcore.layers.build import Build, InputForm
from llmcore.layers.layer import Layer
from llmcore.layers.partial import Partial
from llmcore.layers.step import Bucketed


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension of `size`.

    As the `source` of a quantized linear it returns a Rounded instead of the normed tensor.
    """

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__()
        self.weight = build.empty(size)
        self.eps = eps
        self._build, self._size = build, size
        self.write(None)

    def write(self, form: InputForm | None) -> None:
        """See Source."""
        self._norm = self._build.writer("rms_norm", form, size=self._size)
        self._add_norm = self._build.writer("add_rms_norm", form, size=self._size)
        self._reduce_add_norm = {} if form else self._build.reducers("reduce_add_rms_norm", self._size)

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        y: torch.Tensor = self._norm[step.bucket](x, self.weight, self.eps)
        return y

    def add(
        self, x: torch.Tensor | Partial, residual: torch.Tensor | None, step: Bucketed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(residual + x), residual + x), both [T, size]; without a residual, (norm(x), x).

        Of a Partial it makes the sum over the ranks too.
        """
        if isinstance(x, Partial):
            if residual is not None and x.group in self._reduce_add_norm:
                fused = self._reduce_add_norm[x.group][step.bucket]
                total: tuple[torch.Tensor, torch.Tensor] = fused(x.tensor, residual, self.weight, self.eps)
                return total
            x = x.sum(step)
        if residual is None:
            return self(x, step), x
        y: tuple[torch.Tensor, torch.Tensor] = self._add_norm[step.bucket](x, residual, self.weight, self.eps)
        return y

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill with ones, for `--load_format dummy`."""
        tensor.fill_(1.0)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm with the factor 1 + weight. The sum is held in f32, because a half type would lose small weights."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__(build, size, eps)
        self.weight = nn.Parameter(self.weight.float(), requires_grad=False)

    def finish(self) -> None:
        """Add 1 to the loaded weight. The loader calls it once."""
        self.weight.data.add_(1.0)

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill with zeros; `finish` adds the one."""
        tensor.zero_()


class LayerNorm(Layer):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight, plus a bias if it has one, over the last dimension."""

    def __init__(self, build: Build, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = build.empty(size)
        self.bias = build.empty(size) if bias else None
        self.eps = eps
        self._norm = build.op("layer_norm", size=size, bias=bias)
        self._add_norm = build.op("add_layer_norm", size=size, bias=bias)

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        y: torch.Tensor = self._norm[step.bucket](x, self.weight, self.bias, self.eps)
        return y

    def add(
        self, x: torch.Tensor | Partial, residual: torch.Tensor | None, step: Bucketed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(residual + x), residual + x), both [T, size]; without a residual, (norm(x), x).

        Of a Partial it makes the sum over the ranks first.
        """
        if isinstance(x, Partial):
            x = x.sum(step)
        if residual is None:
            return self(x, step), x
        total: tuple[torch.Tensor, torch.Tensor] = self._add_norm[step.bucket](
            x, residual, self.weight, self.bias, self.eps
        )
        return total

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill with ones, biases too, for `--load_format dummy`."""
        tensor.fill_(1.0)
