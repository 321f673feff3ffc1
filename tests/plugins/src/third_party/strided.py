"""A new granularity, groups of equally spaced columns, and a number format that uses it."""

from __future__ import annotations

import attrs
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity
from third_party.formats import SignedPowers


@attrs.frozen
class Strided(Granularity):
    """A scale for every ``size`` columns ``c, c + n, c + 2n, …`` of a row.

    ``[4, 8], size 4 → n = 2, scale [4, 2]``.
    """

    size: int
    is_local = True

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.size, x.shape[-1] // self.size).transpose(1, 2).reshape(-1, self.size)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self.size)

    def restore(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return rows.reshape(-1, shape[-1] // self.size, self.size).transpose(1, 2).reshape(shape)

    def expand_scale(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        return scale.repeat(1, self.size)

    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        return expanded[:, : shape[1] // self.size]

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        return None if shape[-1] % self.size == 0 else f"has {shape[-1]} columns, not a multiple of {self.size} equally spaced ones"


class StridedPowers(SignedPowers):
    """`SignedPowers` that also allows the qscheme ``third-party.strided``."""

    name = "third_strided"

    def granularity(self, spec: QTensorConfig, *, activation: bool) -> Granularity:
        if spec.qscheme is not None and spec.qscheme.name == "third-party.strided":
            return Strided(spec.group_size or 32)
        return super().granularity(spec, activation=activation)


STRIDED_POWERS = StridedPowers()
