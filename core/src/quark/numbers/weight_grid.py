"""`WeightGrid` represents the values that weights can have, for algorithms that round column by column.

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
    """Computes the scales of stacked weights and rounds the weights, for any `TensorQuantizer`.

    Args:
        quantizers: The weight quantizer of each layer. All layers must have the same spec.
        rows: The number of output channels of each layer. Their sum is N.
        weight: The float32 weights ``Wt [K, N]``. Outer scales are computed from them, and so are scales that
            several rows share.
        shared: Whether the layers share the scale that spans a whole tensor.
        importance: The second moments ``[K]`` of the input channels. A format that learns a table weights the
            channels by them. If it is None, all channels have the same weight.

    Attributes:
        columns: The number K of input channels.
        group: The number of consecutive input channels that share a scale. It is K if there is one scale for
            each row, tensor or block of rows.
        fixed: The scales of round-to-nearest if scales span several rows or groups, and None otherwise. Such
            scales cannot be computed group by group.
        spans: The index of the scale of each group of each row, with shape ``[groups, N]``, if scales span
            several rows or groups. Otherwise None.
        number_of_spans: The number of scales that span several rows or groups.
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
        """Return a grid of the rows ``rows``. Only its methods that compute scales and round may be used.

        If `fixed` is set, ``rows`` must contain all rows.
        """
        part = copy.copy(self)
        part._outer = None if self._outer is None else self._outer[rows]
        return part

    def scales(self, w: Tensor) -> GroupScales:
        """Return the scales of the m groups in ``w [m · group, N]``, as in round-to-nearest.

        The scales cover the ranges of the values in ``w``.
        """
        return self._scales_from_ranges(*self.ranges(w), observed=True)

    def scales_of_ranges(self, low: Tensor, high: Tensor) -> GroupScales:
        """Return the scales of m groups for ranges ``[m, N]`` that a search has chosen.

        The scales are rounded to the scale format of the spec.
        """
        return self._scales_from_ranges(low, high, observed=False)

    def _scales_from_ranges(self, low: Tensor, high: Tensor, *, observed: bool) -> GroupScales:
        qparams = self._quantizers[0].scales_from_ranges(low, high, self._outer, observed=observed)
        return self._group_scales(qparams.scale, qparams.zero_point, self._outer)

    def with_subscales(self, w: Tensor, scales: GroupScales) -> GroupScales:
        """Multiply ``scales`` by the subscales that a microexponent format chooses for the weights ``w``.

        ``w`` contains m groups and has the shape ``[m · group, N]``. The result has one row for each input
        channel. If the format has no subscales, return ``scales`` itself.
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
        """Round ``t`` in place, and return ``t``.

        The shape of ``t`` is ``[m · group, N]``. If `vector` is 1, it may also be ``[N]``. ``scales`` then
        contains the scales of one group.
        """
        size = 1 if t.ndim == 1 else t.shape[0] // scales.scale.shape[0]
        if size > 1:
            self._round(t.view(-1, size, t.shape[1]), scales.map(lambda x: x.unsqueeze(1)))
            return t
        return self._round(t, scales)

    def error(self, w: Tensor, scales: GroupScales, out: Tensor) -> Tensor:
        """Write the rounding error ``w − Q(w)`` to ``out``, and return ``out``. Q means rounding.

        ``w [m · group, N]`` must be contiguous.
        """
        size = w.shape[0] // scales.scale.shape[0]
        w, out, scales = w.view(-1, size, w.shape[1]), out.view(-1, size, w.shape[1]), scales.map(lambda x: x.unsqueeze(1))
        return torch.addcmul(w, self._steps(w, scales, out), scales.scale, value=-1, out=out).view(-1, w.shape[2])

    def rounder(
        self, scales: GroupScales, order: Tensor | None = None, first: int | None = None, order_on_host: Sequence[int] | None = None
    ) -> ColumnRounder:
        """Return the `ColumnRounder` that rounds one run of `vector` input channels after another.

        The results equal the results of `round_`.

        Args:
            scales: The scales of all groups, or those of all channels (`with_subscales`).
            order: A permutation ``[K]`` of the channels. If it is set, number k means channel ``order[k]``.
                The channels of a vector must stay adjacent.
            first: The index of the first channel if ``scales`` has one row for each of several channels.
            order_on_host: The same permutation as a list. If it is None, ``order`` is copied from its device.
        """
        size = self.columns // scales.scale.shape[0] if first is None else 1
        return ColumnRounder(self._element_format, self._level.spec, scales, size, order, first or 0, order_on_host)

    def _round(self, t: Tensor, scales: GroupScales) -> Tensor:
        return self._steps(t, scales, t).mul_(scales.scale)

    def _steps(self, t: Tensor, scales: GroupScales, out: Tensor) -> Tensor:
        """Round ``t``, write the rounded values in units of the scales to ``out``, and return ``out``.

        ``out`` may be the same tensor as ``t``.
        """
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
        """Split the scales of all groups, and return the scales of each layer."""
        qparams = []
        for index, quantizer in enumerate(self._quantizers):
            rows, reduce_scale = self._slice(index), quantizer.granularity.reduce_scale
            shape = (rows.stop - rows.start, self.columns)
            zero = None if scales.zero is None else reduce_scale(scales.zero[:, rows].t(), shape).contiguous()
            outer = None if self._outers is None else self._outers[index].clone()
            qparams.append(QParams(reduce_scale(scales.stored[:, rows].t(), shape).contiguous(), zero, outer, self.table))
        return qparams

    def weights(self, qt: Tensor, scales: GroupScales, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, QParams, Tensor | None]]:
        """Split the rounded values ``qt [K, N]``, and return the weight, the scales and the codes of each
        layer.

        The weights ``[rows, K]`` are exactly the values that `dequantize` returns, cast to ``dtype``. A value
        beyond the range of ``dtype`` becomes the nearest value of the grid in this range, or the largest
        value of ``dtype``. Codes are None if they have not been computed.
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
        """Whether the results of `scales_of_ranges` are powers of two if outer scales are left out."""
        high = torch.tensor(_RANGES, dtype=torch.float32)
        outer = None if self._outer is None else torch.ones((), dtype=torch.float32)
        scale = self._quantizers[0].scales_from_ranges(-high, high, outer, observed=False).scale
        return bool((torch.frexp(scale.float())[0] == 0.5).all())

    @property
    def max_magnitude(self) -> float:
        """The largest magnitude that the format can represent under a symmetric spec, in units of the
        scale."""
        return self._level.format.max_magnitude(self._level.spec)

    @property
    def gap(self) -> float:
        """The ratio of the two largest magnitudes of an element: 1.5 in FP4, 8 / 7 in INT4, about 1 in INT8.

        The ratio is 1 if 0 is the only smaller magnitude, as in a ternary format. It is also 1 if the format
        rounds vectors.
        """
        if self.vector > 1:
            return 1.0
        far = torch.finfo(torch.float32).max
        largest = float(self._element_format.round_(torch.tensor([-far, far], dtype=torch.float32)).abs().max())
        below = self._element_format.round_(torch.linspace(-largest, largest, _PROBES, dtype=torch.float32)).abs()
        return largest / max(below[(below > 0) & (below < largest)].tolist(), default=largest)

    def _table(self, weight: Tensor, importance: Tensor | None) -> Tensor | None:
        """Return the table that the format learns for ``weight [K, N]`` with the scales of round-to-nearest.

        Return None if the format has no table.
        """
        if self._level.format.table_shape is None:
            return None
        if len(self._quantizers) > 1:
            raise ConfigError(f"each layer has its own table in the format {self._level.format.name}. Make one WeightGrid for each layer")
        w = weight.t()
        observer = self._level.observer()
        observer.observe(w)
        return self._level.with_learned_table(w, self._level.qparams_from(observer), importance).table

    def _outer_scales(self, weight: Tensor, common: Observer | None) -> list[Tensor] | None:
        """Return the outer scale of each layer, with shape ``[]`` or ``[rows]``. Return None if the
        quantizers have no outer scales."""
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
        """Compute scales that span several rows from the ranges of each layer. Repeat them for every row and
        group."""
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
        """Return the ends of the stored level's ranges for ``weight [K, rows]``, not divided by outer
        scales."""
        observer = self._level.observer()
        if self._outers is None or self._level.observer_class.is_extremes:
            observer.observe(weight.t())
            return observer.range()
        observer.observe((weight / self._outers[index]).t())
        low, high = observer.range()
        return low * self._outers[index], high * self._outers[index]

    def spanning(self, factor: Tensor) -> GroupScales:
        """Multiply the ranges of scales that span several rows by ``factor``, and return the new scales.

        ``factor`` has one element for each number in `spans`.
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
        """Join and expand the layers' tensors of scales that span several rows to the shape ``[groups,
        N]``."""
        expand = self._level.granularity.expand_scale
        return torch.cat([expand(x, (rows, self.columns)).t() for x, rows in zip(parts, self._rows, strict=True)], 1).contiguous()

    def ranges(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends ``[m, N]`` of the ranges of the groups of ``w [m · group, N]``.

        The observer of the spec computes the ranges.
        """
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
