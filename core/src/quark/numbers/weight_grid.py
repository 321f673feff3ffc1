"""WeightGrid: the values that the weights of a rounding task can have, for column-by-column rounding.

Layers that share an input are stacked and transposed into one matrix ``Wt [K, N]``, with K input channels and
the N output channels of all layers. An input channel, which is a column of the weight, is then contiguous in
memory. Scales are ``[groups, N]``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from quark.base.scalars import numbers
from quark.errors import ConfigError
from quark.numbers.column_rounder import ColumnRounder, GroupScales
from quark.numbers.granularity import PerGroup
from quark.numbers.number_format import QParams
from quark.numbers.observer import Observer
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.numbers.tiles import cast_finite

_PROBES = 4097
"""Number of values between the largest and its negative that `WeightGrid.gap` rounds: enough for formats up
to 12 bits.
"""
_RANGES = (1.0, 1.3, 1.7, 3.1, 23.0)
"""Largest values that give scales of different mantissas, unless scales are powers of two."""


class WeightGrid:
    """Scales and rounding of stacked weights, for any `TensorQuantizer`.

    Args:
        quantizers: The weight quantizer of each layer; all have one spec.
        rows: Number of output channels of each layer, N in total.
        weight: ``Wt [K, N]``, float32; outer scales, and scales that span rows, are found from it.
        shared: Whether the layers share the scale that spans a whole tensor.
        importance: Second moments of the input channels, ``[K]``: weights of the channels when a format
            learns a table. None weighs all channels alike.

    Attributes:
        columns: K, the number of input channels.
        group: Number of consecutive input channels that share a scale; K if there is one scale for each row,
            tensor or block of rows.
        fixed: The scales of round-to-nearest, if scales span rows or groups and so cannot be found group by
            group; else None.
        spans: Index of the scale of each group of each row, ``[groups, N]``, if scales span rows or groups;
            else None.
        number_of_spans: Number of these scales; 0 if none span rows or groups.
        vector: How many channels in a row are rounded together (`quark.numbers.NumberFormat.vector`).
        table: The table of the layer's format, or None. A layer with a table has a grid of its own.
    """

    def __init__(
        self,
        quantizers: Sequence[TensorQuantizer],
        rows: Sequence[int],
        weight: Tensor,
        *,
        shared: bool = False,
        importance: Tensor | None = None,
    ) -> None:
        self._quantizers = quantizers
        self._rows = list(rows)
        self._level = quantizers[0].stored_level
        common = quantizers[0].observer() if shared else None
        if common is not None:
            common.observe(weight.t())
        self._outers = self._outer_scales(weight, common)
        self._outer = None if self._outers is None else torch.cat([o.expand(n) for o, n in zip(self._outers, self._rows, strict=True)])
        self.vector = self._level.format.vector
        self.table = self._table(weight, importance)
        number_format = self._level.format if self.table is None else self._level.format.with_table(self.table)
        self._element_format = number_format.element_format()
        self._by_reciprocal = self._level.format.by_reciprocal(self._level.spec)
        self.columns = weight.shape[0]
        group = self._level.granularity.columns_per_scale(self.columns)
        self.group = self.columns if group is None else group
        self.spans: Tensor | None = None
        self.number_of_spans = 0
        self._span_ranges: list[tuple[Tensor, Tensor]] = []
        self._span_numbers: list[Tensor] = []
        self.fixed = self._fixed_scales(weight, common) if group is None else None

    def of_rows(self, rows: slice) -> WeightGrid:
        """Return a grid of some rows that can only find scales and round; of all rows if `fixed` is set."""
        part = copy.copy(self)
        part._outer = None if self._outer is None else self._outer[rows]
        return part

    def scales(self, w: Tensor) -> GroupScales:
        """Return the scales of ``w [m · group, N]`` from its own ranges, as in round-to-nearest."""
        return self._scales_from_ranges(*self.ranges(w), observed=True)

    def scales_of_ranges(self, low: Tensor, high: Tensor) -> GroupScales:
        """Return scales for ranges ``[m, N]`` that a search chose, in the form that the spec stores."""
        return self._scales_from_ranges(low, high, observed=False)

    def _scales_from_ranges(self, low: Tensor, high: Tensor, *, observed: bool) -> GroupScales:
        qparams = self._quantizers[0].scales_from_ranges(low, high, self._outer, observed=observed)
        return self._group_scales(qparams.scale, qparams.zero_point, self._outer)

    def with_subscales(self, w: Tensor, scales: GroupScales) -> GroupScales:
        """Return scales with the subscales of a microexponent format, chosen from ``w [m · group, N]``.

        They have one row for each input channel. Formats without subscales return ``scales`` itself.
        """
        if not self.has_subscales:
            return scales
        size = w.shape[0] // scales.scale.shape[0]
        each = scales.expanded(size)
        subscales = self._level.format.subscales((w / each.scale).t().contiguous())
        assert subscales is not None
        scale = each.scale * subscales.t()
        return attrs.evolve(each, scale=scale, inverse=None if each.inverse is None else 1 / scale)

    @property
    def has_subscales(self) -> bool:
        """Whether `with_subscales` changes anything."""
        return self.table is None and self._element_format is not self._level.format

    def round_(self, t: Tensor, scales: GroupScales) -> Tensor:
        """Round ``t [m · group, N]``, or ``[N]`` with the scales of one group, in place, and return it.

        ``[N]`` is for formats whose `vector` is 1.
        """
        size = 1 if t.ndim == 1 else t.shape[0] // scales.scale.shape[0]
        if size > 1:
            self._round(t.view(-1, size, t.shape[1]), scales.map(lambda x: x.unsqueeze(1)))
            return t
        return self._round(t, scales)

    def error(self, w: Tensor, scales: GroupScales, out: Tensor) -> Tensor:
        """Write ``w − Q(w)`` of a contiguous ``w [m · group, N]`` to ``out`` in few passes, and return it."""
        size = w.shape[0] // scales.scale.shape[0]
        w, out, scales = w.view(-1, size, w.shape[1]), out.view(-1, size, w.shape[1]), scales.map(lambda x: x.unsqueeze(1))
        return torch.addcmul(w, self._steps(w, scales, out), scales.scale, value=-1, out=out).view(-1, w.shape[2])

    def rounder(
        self, scales: GroupScales, order: Tensor | None = None, first: int | None = None, order_on_host: Sequence[int] | None = None
    ) -> ColumnRounder:
        """Return the `ColumnRounder` that rounds one run of `vector` input channels after another.

        The results equal the results of `round_`.

        Args:
            scales: Scales of all groups, or of all channels (`with_subscales`).
            order: A permutation of the channels ``[K]``: number k then means channel ``order[k]``. A vector
                stays together.
            first: Index of the first channel, if ``scales`` has one row for each of several channels.
            order_on_host: ``order`` as a list, if you have it; otherwise it is read from its device.
        """
        size = self.columns // scales.scale.shape[0] if first is None else 1
        return ColumnRounder(self._element_format, self._level.spec, scales, size, order, first or 0, order_on_host)

    def _round(self, t: Tensor, scales: GroupScales) -> Tensor:
        return self._steps(t, scales, t).mul_(scales.scale)

    def _steps(self, t: Tensor, scales: GroupScales, out: Tensor) -> Tensor:
        """Write grid values, in units of the scales, to ``out``, which may be ``t``, and return it."""
        if scales.inverse is None:
            torch.div(t, scales.scale, out=out)
        else:
            torch.mul(t, scales.inverse, out=out)
        if self.vector == 1:
            self._element_format.round_(out, scales.zero)
        else:  # neighbours in a row of the weight are rounded together: they come last
            zero = None if scales.zero is None else scales.zero.mT
            out.copy_(self._element_format.round_(out.mT.contiguous(), zero).mT)
        return out if scales.zero is None else out.sub_(scales.zero)

    def qparams(self, scales: GroupScales) -> list[QParams]:
        """Return the scales of each layer's quantizer, from the scales of all groups."""
        qparams = []
        for index, quantizer in enumerate(self._quantizers):
            rows, reduce_scale = self._slice(index), quantizer.granularity.reduce_scale
            shape = (rows.stop - rows.start, self.columns)
            zero = None if scales.zero is None else reduce_scale(scales.zero[:, rows].t(), shape).contiguous()
            outer = None if self._outers is None else self._outers[index].clone()
            qparams.append(QParams(reduce_scale(scales.stored[:, rows].t(), shape).contiguous(), zero, outer, self.table))
        return qparams

    def weights(self, qt: Tensor, scales: GroupScales, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, QParams, Tensor | None]]:
        """Return the weight, the scales and the codes of each layer, from values on the grid ``[K, N]``.

        Weights ``[rows, K]`` are exactly the values of `dequantize`, in ``dtype``. A value beyond the range
        of ``dtype`` becomes the nearest value of the grid in that range, or the largest value of ``dtype``.
        Codes are None if rounding has found none.
        """
        layers = []
        limit = torch.finfo(dtype).max
        low, high = numbers(*torch.aminmax(qt))
        is_beyond = max(-low, high) > limit
        for index, (quantizer, qparams) in enumerate(zip(self._quantizers, self.qparams(scales), strict=True)):
            values, codes = qt[:, self._slice(index)].t().contiguous(), None
            # Two multiplications may differ in the last bit from one multiplication by their product. A value
            # that is cut off has another code. In 16 bits, neighbouring vectors may be hard to tell apart.
            if is_beyond or not quantizer.has_one_product or self.vector > 1:
                codes = quantizer.codes_of(values.clamp_(-limit, limit), qparams)
                values = quantizer.dequantize(codes, qparams)
            layers.append((cast_finite(values, dtype), qparams, codes))
        return layers

    @property
    def has_powers_of_two(self) -> bool:
        """Whether `scales_of_ranges` returns powers of two, before multiplication by outer scales."""
        high = torch.tensor(_RANGES, dtype=torch.float32)
        outer = None if self._outer is None else torch.ones((), dtype=torch.float32)
        scale = self._quantizers[0].scales_from_ranges(-high, high, outer, observed=False).scale
        return bool((torch.frexp(scale.float())[0] == 0.5).all())

    @property
    def max_magnitude(self) -> float:
        """Largest representable magnitude in units of the scale, for symmetric specs."""
        return self._level.format.max_magnitude(self._level.spec)

    @property
    def gap(self) -> float:
        """Ratio of an element's two largest magnitudes: 1.5 in FP4, 8 / 7 in INT4, about 1 in INT8.

        It is 1 if only 0 lies below the largest magnitude, as in a ternary format, and for vectors.
        """
        if self.vector > 1:
            return 1.0
        far = torch.finfo(torch.float32).max
        largest = float(self._element_format.round_(torch.tensor([-far, far], dtype=torch.float32)).abs().max())
        below = self._element_format.round_(torch.linspace(-largest, largest, _PROBES, dtype=torch.float32)).abs()
        return largest / max(below[(below > 0) & (below < largest)].tolist(), default=largest)

    def _table(self, weight: Tensor, importance: Tensor | None) -> Tensor | None:
        """Return the table for the weight ``[K, N]``, under the scales of round-to-nearest, or None."""
        if self._level.format.table_shape is None:
            return None
        if len(self._quantizers) > 1:
            raise ConfigError(f"each layer has a table of its own in {self._level.format.name}: make a grid for each of them")
        w = weight.t()
        observer = self._level.observer()
        observer.observe(w)
        return self._level.with_learned_table(w, self._level.qparams_from(observer), importance).table

    def _outer_scales(self, weight: Tensor, common: Observer | None) -> list[Tensor] | None:
        """Return the outer scale of each layer, ``[]`` or ``[rows]``; None if the quantizers have none."""
        scales = []
        for index, quantizer in enumerate(self._quantizers):
            scale = quantizer.outer_scale(weight[:, self._slice(index)].t(), common)
            if scale is None:
                return None
            scales.append(scale)
        return scales

    def _slice(self, index: int) -> slice:
        start = sum(self._rows[:index])
        return slice(start, start + self._rows[index])

    def _fixed_scales(self, weight: Tensor, common: Observer | None) -> GroupScales:
        """Return scales that span rows, from the ranges of each layer, for every row and group."""
        is_shared = common is not None and self._outers is None
        count = 0
        for index in range(len(self._quantizers)):
            low, high = common.range() if common is not None and is_shared else self._level_range(weight[:, self._slice(index)], index)
            start = 0 if is_shared else count
            count = start + low.numel()
            self._span_ranges.append((low, high))
            self._span_numbers.append(torch.arange(start, count, device=low.device).view(low.shape))
        self.number_of_spans = count
        self.spans = self._spread(self._span_numbers)
        self.group = self.columns // self.spans.shape[0]
        return self._spanning_scales(torch.ones(count, device=weight.device, dtype=torch.float32), observed=True)

    def _level_range(self, weight: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return low and high of the stored level for a weight ``[K, rows]``, in the weight's units."""
        observer = self._level.observer()
        if self._outers is None or self._level.observer_class.is_extremes:
            observer.observe(weight.t())
            return observer.range()
        observer.observe((weight / self._outers[index]).t())
        low, high = observer.range()
        return low * self._outers[index], high * self._outers[index]

    def spanning(self, factor: Tensor) -> GroupScales:
        """Return scales that span rows, for their ranges times ``factor``.

        ``factor`` has one element for each number in ``spans``.
        """
        return self._spanning_scales(factor, observed=False)

    def _spanning_scales(self, factor: Tensor, *, observed: bool) -> GroupScales:
        parts = []
        for index, ((low, high), number) in enumerate(zip(self._span_ranges, self._span_numbers, strict=True)):
            outer = None if self._outers is None else self._outers[index]
            each = factor.take(number)
            parts.append(self._quantizers[index].scales_from_ranges(low * each, high * each, outer, observed=observed))
        zeros = [q.zero_point for q in parts if q.zero_point is not None]
        return self._group_scales(self._spread([q.scale for q in parts]), self._spread(zeros) if zeros else None, self._outer)

    def _spread(self, parts: Sequence[Tensor]) -> Tensor:
        """Expand tensors of scales that span rows, one for each layer, to ``[groups, N]``."""
        expand = self._level.granularity.expand_scale
        return torch.cat([expand(x, (rows, self.columns)).t() for x, rows in zip(parts, self._rows, strict=True)], 1).contiguous()

    def ranges(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return low and high ``[m, N]`` of the groups of ``w [m · group, N]``, by the spec's observer."""
        groups = w.reshape(-1, self.group, w.shape[1])
        if self._level.observer_class.is_extremes:
            if self._level.spec.symmetric is not False:
                high = groups.abs().amax(1)
                return -high, high
            return groups.amin(1), groups.amax(1)
        observer = self._level.observer_class(self._level.spec, PerGroup(self.group))
        outer = 1 if self._outer is None else self._outer
        observer.observe((w / outer).t())
        low, high = (x.reshape(w.shape[1], -1).t() * outer for x in observer.range())
        return low.contiguous(), high.contiguous()

    def _group_scales(self, stored: Tensor, zero: Tensor | None, outer: Tensor | None) -> GroupScales:
        scale = stored.float() if outer is None else stored.float() * outer
        return GroupScales(scale, 1 / scale if self._by_reciprocal else None, zero, stored)
