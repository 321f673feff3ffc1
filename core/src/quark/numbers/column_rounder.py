"""ColumnRounder: rounds the input channels of stacked weights one at a time, for loops in which each depends on those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers.group_scales import GroupScales
from quark.numbers.kernels import DeviceCode
from quark.numbers.number_format import NumberFormat

__all__ = ["ColumnRounder"]


class ColumnRounder:
    """A function of ``(t [N], number, out)`` that rounds the input channel of that number into ``out``, by default ``t``.

    Args:
        element_format: The format of one element.
        spec: Of the level whose codes are stored.
        scales: Of groups of channels, or of each channel.
        size: Input channels in a row that share a row of ``scales``.
        order: A permutation of the channels ``[K]``: number k then means channel ``order[k]``.
        first: The channel with which ``scales`` begin.
        order_on_host: ``order`` as a list; without, it is read from its device.
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
        self._round: Callable[[Tensor, int, Tensor | None], Tensor] | None = None

    @property
    def device_code(self) -> DeviceCode | None:
        """The arithmetic of the format, of which a kernel for many channels is made; see `NumberFormat.device_code`."""
        return self._format.device_code(self._spec)

    def __call__(self, t: Tensor, k: int, out: Tensor | None = None) -> Tensor:
        """Return ``out``, or ``t``, with the values of channel number ``k`` for ``t [N]``."""
        if self._round is None:  # for a kernel, no views are needed
            self._round = self._with_views()
        return self._round(t, k, out)

    def _with_views(self) -> Callable[[Tensor, int, Tensor | None], Tensor]:
        """Return what rounds; scales are looked up once for a loop over all channels."""
        count = self.size * self.scales.scale.shape[0]
        own: Sequence[int] = range(self.first, self.first + count)
        if self.order is not None:
            own = self.order.tolist() if self._order_on_host is None else self._order_on_host
        groups = [(channel - self.first) // self.size for channel in own]
        scale, inverse, zero = (_views(x, groups) for x in (self.scales.scale, self.scales.inverse, self.scales.zero))
        assert scale is not None
        first, round_element = self.first, self._format.round_
        divide, factor = (torch.div, scale) if inverse is None else (torch.mul, inverse)

        def round_symmetric(t: Tensor, k: int, out: Tensor | None = None) -> Tensor:
            return round_element(divide(t, factor[k - first], out=t if out is None else out)).mul_(scale[k - first])

        def round_asymmetric(t: Tensor, k: int, out: Tensor | None = None) -> Tensor:
            assert zero is not None
            k -= first
            return round_element(divide(t, factor[k], out=t if out is None else out), zero[k]).sub_(zero[k]).mul_(scale[k])

        return round_symmetric if zero is None else round_asymmetric


def _views(x: Tensor | None, rows: list[int]) -> list[Tensor] | None:
    """Return views of some rows of ``x``, in that order."""
    if x is None:
        return None
    views = x.unbind(0)
    return [views[i] for i in rows]
