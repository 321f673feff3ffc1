"""`ColumnRounder` rounds stacked weights one input channel at a time, or one vector of channels at a time.

Algorithms use it in loops in which the values of a channel depend on the rounding errors of the channels
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers.kernels import DeviceCode
from quark.numbers.number_format import NumberFormat


@attrs.frozen(eq=False)
class GroupScales:
    """The scales of groups of input channels. Each of the ``N`` rows (output channels) has its own scales.

    Attributes:
        scale: The float32 factors by which codes are multiplied. They include the outer scales. The shape is
            ``[groups, N]``, or ``[K, N]`` (one factor for each of ``K`` input channels) if the elements of a
            group have different factors.
        inverse: The reciprocal of ``scale``, or None. It is set if the format multiplies by the reciprocal
            instead of dividing by the scale.
        zero: The zero points ``[groups, N]``, or None if the format has no zero points.
        stored: The scales ``[groups, N]`` that become `QParams.scale`.
    """

    scale: Tensor
    inverse: Tensor | None
    zero: Tensor | None
    stored: Tensor

    def at(self, group: int) -> GroupScales:
        """Return the scales of one group. Each tensor has the shape ``[N]``."""
        return self.map(lambda x: x[group])

    def of_rows(self, rows: slice) -> GroupScales:
        """Return the scales of the output channels ``rows``."""
        return self.map(lambda x: x[:, rows])

    def expanded(self, size: int) -> GroupScales:
        """Repeat the scales of each group ``size`` times, once for each input channel of the group."""
        return self.map(lambda x: x.repeat_interleave(size, 0))

    def where(self, better: Tensor, other: GroupScales) -> GroupScales:
        """Return ``torch.where(better, other, self)`` for every field.

        ``better`` has the shape ``[groups, N]``. Each group must have one scale, not one scale per element.
        """
        return _with_all([self, other], lambda parts: torch.where(better, parts[1], parts[0]))

    @staticmethod
    def joined(parts: Sequence[GroupScales]) -> GroupScales:
        """Concatenate the scales of consecutive groups."""
        return _with_all(parts, torch.cat)

    @staticmethod
    def beside(parts: Sequence[GroupScales]) -> GroupScales:
        """Concatenate scales of consecutive rows. All parts must have the same groups."""
        return _with_all(parts, lambda fields: torch.cat(fields, 1))

    def map(self, change: Callable[[Tensor], Tensor]) -> GroupScales:
        """Return a copy in which ``change`` is applied to every tensor."""
        return _with_all([self], lambda parts: change(parts[0]))


def _with_all(parts: Sequence[GroupScales], change: Callable[[Any], Tensor]) -> GroupScales:
    """Return `GroupScales` in which each field is the result of ``change`` for the list of this field's
    values in all ``parts``.

    A field that is None in the parts stays None.
    """

    def changed(name: str) -> Any:
        fields = [getattr(p, name) for p in parts]
        return None if fields[0] is None else change(fields)

    return GroupScales(**{a.name: changed(a.name) for a in attrs.fields(GroupScales)})


class ColumnRounder:
    """A callable that rounds the values ``t`` of one input channel. The shape of ``t`` is ``[N]``.

    If the format rounds vectors, a call rounds several consecutive channels. The shape of ``t`` is then
    ``[vector, N]``.

    Args:
        element_format: The number format of the elements.
        spec: The spec of the level whose codes are stored.
        scales: The scales of groups of channels or of single channels.
        size: How many consecutive input channels share a row of ``scales``.
        order: A permutation ``[K]`` of the channels. If it is set, number ``k`` means channel ``order[k]``.
        first: The first channel to which the first row of ``scales`` applies.
        order_on_host: The same permutation as a list. If it is None, ``order`` is copied from its device.
    """

    def __init__(
        self,
        element_format: NumberFormat,
        spec: QTensorConfig,
        scales: GroupScales,
        size: int,
        order: Tensor | None = None,
        first: int = 0,
        order_on_host: Sequence[int] | None = None,
    ) -> None:
        self._format = element_format
        self._spec = spec
        self.scales = scales
        self.size = size
        self.order = order
        self.first = first
        self._order_on_host = order_on_host
        self._divide = torch.div if scales.inverse is None else torch.mul
        self._views: tuple[list[Tensor], list[Tensor], list[Tensor] | None] | None = None

    @property
    def device_code(self) -> DeviceCode | None:
        """The device code of the format, or None. Kernels that round many channels are built from it."""
        return self._format.device_code(self._spec)

    def __call__(self, t: Tensor, k: int, out: Tensor | None = None, metric: Tensor | None = None) -> Tensor:
        """Round channel number ``k``, whose values are ``t``, into ``out`` (or in place if ``out`` is None).

        Return the result. If the format rounds vectors, ``metric`` weights the errors of a vector (see
        `NumberFormat.round_in_`). If ``metric`` is None, `NumberFormat.round_` rounds the vector.
        """
        if self._views is None:  # kernels need no views
            self._views = self._views_by_number()
        factors, scales, zeros = self._views
        k -= self.first
        divided = self._divide(t, factors[k], out=t if out is None else out)
        if self._format.vector > 1:
            vectors = divided.t().contiguous()
            if zeros is not None:
                vectors = self._format.round_(vectors, zeros[k][:, None]).sub_(zeros[k][:, None])
            else:
                vectors = self._format.round_(vectors) if metric is None else self._format.round_in_(vectors, metric)
            return divided.copy_(vectors.t()).mul_(scales[k])
        if zeros is None:
            return self._format.round_(divided).mul_(scales[k])
        return self._format.round_(divided, zeros[k]).sub_(zeros[k]).mul_(scales[k])

    def _views_by_number(self) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
        """Return the factors, scales and zero points of all channels, sorted by channel number ``k``."""
        count = self.size * self.scales.scale.shape[0]
        own: Sequence[int] = range(self.first, self.first + count)
        if self.order is not None:
            own = self.order.tolist() if self._order_on_host is None else self._order_on_host
        groups = [(channel - self.first) // self.size for channel in own]
        scales = _views(self.scales.scale, groups)
        factors = scales if self.scales.inverse is None else _views(self.scales.inverse, groups)
        return factors, scales, None if self.scales.zero is None else _views(self.scales.zero, groups)


def _views(x: Tensor, rows: list[int]) -> list[Tensor]:
    """Return a view of row ``i`` of ``x`` for each ``i`` in ``rows``, in the order of ``rows``."""
    views = x.unbind(0)
    return [views[i] for i in rows]
