"""QParams: the scales and zero points of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
from torch import Tensor

__all__ = ["QParams"]


@attrs.frozen(eq=False)
class QParams:
    """Scales, and zero points where the format has them: ``value = (code − zero_point) · scale · outer_scale``.

    Attributes:
        scale: Multiplier, float. ``[]`` per tensor, ``[C]`` per channel, ``[…, groups]`` per group, ``[…]``
            per token.
        zero_point: As ``scale`` in shape, int32 where whole, float32 where real; None for formats without
            one.
        outer_scale: Scale of the scales, float32: ``[]`` for the whole tensor, ``[O]`` for the rows of a
            weight ``[O, I]``; None: none. Nothing else is supported, such as one for each super-block of a
            row: `quark.numbers.WeightGrid` finds the scales of one group of columns at a time, whichever it
            is.
    """

    scale: Tensor
    zero_point: Tensor | None = None
    outer_scale: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are not None, by field name."""
        for name in ("scale", "zero_point", "outer_scale"):
            if (value := getattr(self, name)) is not None:
                yield name, value

    def map(self, change: Callable[[Tensor], Tensor]) -> QParams:
        """Return QParams with ``change`` applied to every tensor."""
        return attrs.evolve(self, **{name: change(value) for name, value in self.items()})
