"""TMA descriptors for kernels in Gluon. Only they import this module, since other Tritons may have another Gluon."""

from __future__ import annotations

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Tiles(TensorDescriptor):  # type: ignore[misc]
    """A TMA descriptor whose maker has checked alignment already. Gluon's own class checks it again."""

    def __post_init__(self) -> None:
        """Checks nothing."""
