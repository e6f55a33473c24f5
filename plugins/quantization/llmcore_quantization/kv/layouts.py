"""KV in 8 and 4 bits: the layouts of heads (`token-int8` and its kin), and of the rows of latent attention.

A number is stored as a code; a group of them shares a scale, and a least value if the form is asymmetric. The scales
are f16, which holds the largest value of any head up to 8e6, or f32 if the model computes in f32. A group whose scale
overflows reads as NaN, and so does one with a NaN. A group of zeros reads as zeros.

`write` leaves in k and v what `gather` returns: both compute code * scale (+ least value) in f32 and round once to the
model's type.
"""

from __future__ import annotations

import math

import torch
from llmcore.api import ConfigError, DType, KVGroupSpec
from llmcore.layers import KV, Layout, zeros

from llmcore_quantization.kv.names import FORMS, GROUP, GROUPS, Form

_CODES = {"i8": torch.int8, "u4": torch.uint8, "e4m3": torch.float8_e4m3fn}

_LARGEST = {"i8": 127, "u4": 15, "e4m3": 448}

_TINY = {torch.float16: 2.0**-24, torch.float32: torch.finfo(torch.float32).tiny}
"""The least scale."""

LATENT_GROUP = 128
"""Elements of a latent that share a scale."""

Stored = tuple[torch.Tensor, torch.Tensor | None]
"""(codes [T, heads, bytes], marks). Marks are scales [T, heads, groups], with least values [T, heads, groups, 2]."""


_Shapes = list[tuple[tuple[int, ...], torch.dtype]]
"""(shape of a slot, dtype) of each tensor of a pool."""


class Side:
    """The keys or the values: `width` numbers of each of `heads` heads in a `form`."""

    def __init__(self, name: str, form: Form, heads: int, width: int, dtype: torch.dtype, marks: torch.dtype) -> None:
        self.form, self.width, self.dtype, self.marks = form, width, dtype, marks
        group = min(form.group or width, width)
        if width % group or (form.codes == "u4" and width % 2):
            others = [str(size) for size in sorted((GROUP, *GROUPS)) if width % min(size, width) == width % 2 == 0]
            raise ConfigError(
                f"layout {name}: groups of {group} do not divide a head of {width} elements; groups of "
                f"{' or '.join(others) or 'no size'} do, with --llm_kv_type int4kv and --llm_kv_quant_group_size"
            )
        self.groups = width // group
        # An asymmetric int8 counts from the least value, so it has no sign.
        self.codes = torch.uint8 if form.least else _CODES[form.codes]
        self.largest = 255 if form.codes == "i8" and form.least else _LARGEST[form.codes]
        self.parts: _Shapes = [((heads, width // 2 if form.codes == "u4" else width), self.codes)]
        if not form.fixed:
            self.parts.append(((heads, self.groups, 2) if form.least else (heads, self.groups), marks))

    def encode(self, x: torch.Tensor, fixed: torch.Tensor | None = None) -> Stored:
        """x [T, heads, width] -> what is stored. `fixed`: the scales [heads] f32 of a form that has them."""
        groups = x.float().reshape(*x.shape[:-1], self.groups, self.width // self.groups)
        if fixed is not None:
            return self._codes(groups / fixed[:, None, None]), None
        if not self.form.least:
            scale = self._scale(groups.abs().amax(-1))
            return self._codes(groups / scale.float()[..., None]), scale
        least = groups.amin(-1).to(self.marks)
        scale = self._scale(groups.amax(-1) - least.float())
        return self._codes((groups - least.float()[..., None]) / scale.float()[..., None]), torch.stack(
            (scale, least), -1
        )

    def decode(self, codes: torch.Tensor, marks: torch.Tensor | None, fixed: torch.Tensor | None) -> torch.Tensor:
        """Codes and marks -> [T, heads, width] in the model's type."""
        if self.form.codes == "u4":
            codes = torch.cat((codes & 15, codes >> 4), -1)
        groups = codes.float().view(*codes.shape[:-1], self.groups, self.width // self.groups)
        if fixed is not None:
            groups = groups * fixed[:, None, None]
        elif marks is not None and self.form.least:
            groups = groups * marks[..., :1].float() + marks[..., 1:].float()
        elif marks is not None:
            groups = groups * marks.float()[..., None]
        return groups.flatten(-2).to(self.dtype)

    def _scale(self, span: torch.Tensor) -> torch.Tensor:
        # Torch divides by a tensor as IEEE says. By a number, on a GPU, it multiplies with the reciprocal.
        steps = torch.full_like(span, self.largest)
        return (span / steps).to(self.marks).clamp(min=_TINY[self.marks])

    def _codes(self, steps: torch.Tensor) -> torch.Tensor:
        least = 0 if self.form.least else -self.largest
        rounded = steps if self.form.codes == "e4m3" else steps.round()
        codes = rounded.clamp(least, self.largest).flatten(-2).to(self.codes)
        if self.form.codes != "u4":
            return codes
        # Elements d and d + width / 2 share a byte, so that a kernel unpacks a tile into two contiguous ones.
        low, high = codes.chunk(2, -1)
        return low | high << 4


class _Parts(Layout):
    """A layout whose pool has a tensor [slots, *shape] for each (shape, dtype) of `parts`."""

    parts: _Shapes

    @property
    def bytes(self) -> int:
        """The bytes of one granule over all layers."""
        slot = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts)
        return slot * self.granule * len(self.group.layers)

    def layer_tensors(self, granules: int, device: torch.device) -> KV:
        """Zeros, which read as zeros."""
        return tuple(zeros((granules * self.granule, *shape), dtype, device) for shape, dtype in self.parts)


class TokenCodes(_Parts):
    """The layouts of `names.FORMS`.

    A layer has the codes of keys and values [slots, kv_heads, bytes]. Then follow their marks. If scales are fixed,
    they follow instead, as constants [kv_heads] f32 of keys and of values.
    """

    def __init__(self, group: KVGroupSpec, granule: int, dtype: DType) -> None:
        super().__init__(group, granule, dtype)
        marks = torch.float32 if dtype == "f32" else torch.float16
        widths = (group.key_size, group.value_size)
        self._sides = [
            Side(group.layout, form, group.kv_heads, width, self.dtype, marks)
            for form, width in zip(FORMS[group.layout], widths, strict=True)
        ]
        self.parts = [part for parts in zip(*(side.parts for side in self._sides), strict=True) for part in parts]
        self._fixed = self._sides[0].form.fixed
        self.scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Layer -> the fixed scales of keys and of values, [KV heads of all ranks] f32 each; 1 where it is missing."""

    def constants(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The fixed scales of a layer's keys and values."""
        ones = torch.ones(self.whole.kv_heads)
        return self.scales.get(layer, (ones, ones)) if self._fixed else ()

    def own_constants(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The scales of this rank's KV heads."""
        return tuple(scale.narrow(0, self.first_head, self.group.kv_heads) for scale in self.constants(layer))

    def write(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values as codes, and leave in k and v what these stand for."""
        for index, (side, new) in enumerate(zip(self._sides, (k, v), strict=True)):
            fixed = kv[index + 2] if self._fixed else None
            codes, marks = side.encode(new, fixed)
            _put(kv[index], slots, codes)
            if marks is not None:
                kv[index + 2].index_copy_(0, slots, marks)
            new.copy_(side.decode(codes, marks, fixed))

    def gather(self, kv: KV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that the codes at `slots` stand for."""
        (key, value), fixed = self._sides, self._fixed
        return _read(key, kv[0], kv[2], slots, fixed), _read(value, kv[1], kv[3], slots, fixed)


def _read(side: Side, codes: torch.Tensor, beside: torch.Tensor, slots: torch.Tensor, fixed: bool) -> torch.Tensor:
    """`beside`: the pool of marks, or the constants."""
    # as bytes: torch selects no rows of float8 on some devices
    found = codes.view(torch.uint8).index_select(0, slots).view(codes.dtype)
    return side.decode(found, None, beside) if fixed else side.decode(found, beside.index_select(0, slots), None)


def _put(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """index_copy_ of rows whose elements are bytes."""
    pool.view(torch.uint8).index_copy_(0, slots, rows.view(torch.uint8))


class LatentCodes(_Parts):
    """Layout `mla-latent-fp8`: the latent as e4m3 with f32 scales per 128 elements, the rotated key as it is.

    A layer has codes [slots, 1, latent], scales [slots, 1, groups] and rotated keys [slots, 1, rotated] in the model's
    type. The value is the latent.
    """

    sharded = False
    joined = True

    def __init__(self, group: KVGroupSpec, granule: int, dtype: DType) -> None:
        super().__init__(group, granule, dtype)
        form = Form("e4m3", group=LATENT_GROUP)
        heads, latent = group.kv_heads, group.value_size
        self._side = Side(group.layout, form, heads, latent, self.dtype, torch.float32)
        self.parts = [*self._side.parts, ((heads, group.key_size - latent), self.dtype)]

    def write(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Store rows k [T, kv_heads, key_size], and leave in them what is stored. v is a part of them."""
        latent, rotated = k.split_with_sizes((self.group.value_size, self.group.key_size - self.group.value_size), -1)
        codes, scales = self._side.encode(latent)
        assert scales is not None, "these scales are not fixed"
        _put(kv[0], slots, codes)
        kv[1].index_copy_(0, slots, scales)
        kv[2].index_copy_(0, slots, rotated)
        latent.copy_(self._side.decode(codes, scales, None))

    def gather(self, kv: KV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows, and their latents."""
        latent = _read(self._side, kv[0], kv[1], slots, False)
        return torch.cat((latent, kv[2].index_select(0, slots)), -1), latent
