"""WeightGrid: the values that the weights of some layers may take, for algorithms that choose them column by column.

Layers that share an input are stacked into one matrix, and that lies transposed, ``Wt [K, N]``: an input channel, which is what such
algorithms go along, is then a row of contiguous memory. Scales lie likewise, ``[groups, N]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.quantizers.finite import cast_finite
from quark.quantizers.granularity import PerChannel, PerGroup
from quark.quantizers.number_format import NumberFormat
from quark.quantizers.observer import Observer
from quark.quantizers.progressive import ProgressiveQuantizer
from quark.quantizers.qparams import QParams
from quark.quantizers.single_level import SingleLevelQuantizer
from quark.quantizers.tensor_quantizer import TensorQuantizer
from quark.quantizers.two_level import TwoLevelQuantizer

ALL = slice(None)
"""All rows of a stack."""
_PROBES = 4097
"""Values by which the gap below the largest is found; that of 12 bits and more is as good as none."""


@attrs.frozen(eq=False)
class GroupScales:
    """Scales of some groups of input channels, for every row.

    Attributes:
        scale: What codes are multiplied by, float32, outer scales included: ``[groups, N]``, or ``[K, N]`` where elements differ.
        inverse: Its reciprocal, for formats that multiply by it; else None.
        zero: Zero points, ``[groups, N]``, or None.
        stored: As `QParams.scale` holds them, ``[groups, N]``.
    """

    scale: Tensor
    inverse: Tensor | None
    zero: Tensor | None
    stored: Tensor

    def at(self, group: int) -> GroupScales:
        """The scales of one group, each ``[N]``."""
        return self.map(lambda x: x[group])

    def part(self, groups: slice | Tensor) -> GroupScales:
        """The scales of some groups."""
        return self.map(lambda x: x[groups])

    def of_rows(self, rows: slice) -> GroupScales:
        """The scales of some rows."""
        return self.map(lambda x: x[:, rows])

    def expanded(self, size: int) -> GroupScales:
        """One row for each input channel of groups of that size."""
        return self.map(lambda x: x.repeat_interleave(size, 0))

    def where(self, better: Tensor, other: GroupScales) -> GroupScales:
        """These, but the other's where ``better [groups, N]`` says so; neither may differ within groups."""
        return _with_all([self, other], lambda parts: torch.where(better, parts[1], parts[0]))

    @staticmethod
    def joined(parts: Sequence[GroupScales]) -> GroupScales:
        """Scales of consecutive groups as one."""
        return _with_all(parts, torch.cat)

    @staticmethod
    def beside(parts: Sequence[GroupScales]) -> GroupScales:
        """Scales of the same groups for consecutive rows as one."""
        return _with_all(parts, lambda found: torch.cat(found, 1))

    def map(self, change: Callable[[Tensor], Tensor]) -> GroupScales:
        """The same with ``change`` applied to every tensor."""
        return _with_all([self], lambda parts: change(parts[0]))


def _with_all(parts: Sequence[GroupScales], change: Callable[[Any], Tensor]) -> GroupScales:
    """What ``change`` makes of the scales of all parts, of their inverses, and so on; what is None stays so."""

    def made(name: str) -> Any:
        found = [getattr(p, name) for p in parts]
        return None if found[0] is None else change(found)

    return GroupScales(**{a.name: made(a.name) for a in attrs.fields(GroupScales)})


class WeightGrid:
    """What stacked weights may become.

    Args:
        quantizers: Of the weights of each layer, all of one spec.
        rows: Of each layer, N in all.
        weight: ``Wt [K, N]``, float32; outer scales, and scales that span rows, are found from it.
        shared: Whether the layers share the scale that spans a whole tensor.

    Attributes:
        group: Input channels that share a scale in one row; K where there is one scale for each row, tensor or block of rows.
        fixed: The scales by their ranges, where they span rows: they cannot be found group by group. Else None.
        spans: Where they do, which scale each group of each row has, ``[groups, N]``, numbers from 0 on. Else None.
    """

    def __init__(self, quantizers: Sequence[TensorQuantizer], rows: Sequence[int], weight: Tensor, *, shared: bool = False) -> None:
        self._quantizers = quantizers
        self._rows = list(rows)
        self._stage, self._outer = self._opened(weight, shared)
        self._exact = self._stage.format.element_format()
        self._by_reciprocal = self._stage.format.by_reciprocal(self._stage.spec)
        self.columns = weight.shape[0]
        found = self._stage.granularity
        self.group = (found.size if found.size != -1 else self.columns) if isinstance(found, PerGroup) else self.columns
        is_local = isinstance(found, PerGroup) or (isinstance(found, PerChannel) and found.axis in (0, -2))
        self.spans: Tensor | None = None
        self._span_ranges: list[tuple[Tensor, Tensor]] = []
        self._span_numbers: list[Tensor] = []
        self.fixed = None if is_local else self._spanning(weight, shared)

    def scales(self, w: Tensor, rows: slice = ALL) -> GroupScales:
        """Scales of ``w [m · group, n]`` by its ranges, those of round-to-nearest; ``rows`` are those of the n in the stack."""
        low, high = self.ranges(w, rows)
        first = self._quantizers[0]
        if self._outer is None or not isinstance(first, ProgressiveQuantizer):
            return self.scales_of_ranges(low, high, rows)
        outer, seen = self._outer[rows], first.first.format.round_  # the second stage sees what the first has rounded; the order is kept
        return self._under(seen(low / outer), seen(high / outer), outer)

    def scales_of_ranges(self, low: Tensor, high: Tensor, rows: slice = ALL) -> GroupScales:
        """Scales of ranges ``[m, n]``, as the spec stores them."""
        outer = None if self._outer is None else self._outer[rows]
        if outer is None:
            found = self._stage.format.qparams(low, high, self._stage.spec)
            return self._made(found.scale, found.zero_point, None)
        quantizer = self._quantizers[0]
        if isinstance(quantizer, ProgressiveQuantizer):
            return self._under(low / outer, high / outer, outer)
        assert isinstance(quantizer, TwoLevelQuantizer)
        return self._made(quantizer.block_scales(torch.maximum(-low, high), outer), None, outer)

    def _under(self, low: Tensor, high: Tensor, outer: Tensor) -> GroupScales:
        """Scales of ranges that are relative to the first of two levels."""
        found = self._stage.format.qparams(low, high, self._stage.spec)
        return self._made(found.scale, found.zero_point, outer)

    def with_subscales(self, w: Tensor, scales: GroupScales) -> GroupScales:
        """The same; but where a format lets elements share finer steps inside a group, decided by ``w [m · group, N]``: one row for each
        input channel."""
        if not self.has_subscales:
            return scales
        size = w.shape[0] // scales.scale.shape[0]
        each = scales.expanded(size)
        steps = self._stage.format.subscales((w / each.scale).t().contiguous())
        assert steps is not None
        scale = each.scale * steps.t()
        return attrs.evolve(each, scale=scale, inverse=None if each.inverse is None else 1 / scale)

    @property
    def has_subscales(self) -> bool:
        """Whether `with_subscales` has anything to decide."""
        return self._exact is not self._stage.format

    def round_(self, t: Tensor, scales: GroupScales) -> Tensor:
        """Round ``t [m · group, N]`` in place to values of the grid, or ``[N]`` with the scales of one group; returns it."""
        size = 1 if t.ndim == 1 else t.shape[0] // scales.scale.shape[0]
        if size > 1:
            self._round(t.view(-1, size, t.shape[1]), scales.map(lambda x: x.unsqueeze(1)))
            return t
        return self._round(t, scales)

    def rounder(self, scales: GroupScales, order: Tensor | None = None) -> Callable[..., Tensor]:
        """A function of ``(t [N], number, out)`` that rounds the input channel of that number into ``out``, by default ``t``; returns it.

        It is what `round_` does with the scales of that channel, made ready for loops over all channels.

        Args:
            scales: Of all groups, or of all channels (`with_subscales`).
            order: A permutation of the channels ``[K]``: number k then means channel ``order[k]``.
        """
        span = self.columns // scales.scale.shape[0]
        which = ((torch.arange(self.columns) if order is None else order) // span).tolist()
        scale, inverse, zero = (_picked(x, which) for x in (scales.scale, scales.inverse, scales.zero))
        assert scale is not None
        exact = self._exact.round_
        scaled, factor = (torch.div, scale) if inverse is None else (torch.mul, inverse)

        def round_symmetric(t: Tensor, k: int, out: Tensor | None = None) -> Tensor:
            return exact(scaled(t, factor[k], out=t if out is None else out)).mul_(scale[k])

        def round_asymmetric(t: Tensor, k: int, out: Tensor | None = None) -> Tensor:
            assert zero is not None
            return exact(scaled(t, factor[k], out=t if out is None else out), zero[k]).sub_(zero[k]).mul_(scale[k])

        return round_symmetric if zero is None else round_asymmetric

    def _round(self, t: Tensor, scales: GroupScales) -> Tensor:
        if scales.inverse is None:
            t.div_(scales.scale)
        else:
            t.mul_(scales.inverse)
        self._exact.round_(t, scales.zero)
        if scales.zero is not None:
            t.sub_(scales.zero)
        return t.mul_(scales.scale)

    def qparams(self, scales: GroupScales) -> list[QParams]:
        """What each layer's quantizer is to keep, of the scales of all groups."""
        found = []
        for index, quantizer in enumerate(self._quantizers):
            part, kept = self._slice(index), quantizer.granularity.reduce_scale
            zero = None if scales.zero is None else kept(scales.zero[:, part].t()).contiguous()
            outer = None if self._outer is None else self._outer[part.start].clone()
            found.append(QParams(kept(scales.stored[:, part].t()).contiguous(), zero, outer))
        return found

    def weights(self, qt: Tensor, scales: GroupScales, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, QParams]]:
        """The weights ``[rows, K]`` of each layer and their scales, of values on the grid, ``[K, N]``: exactly what their codes say.

        Weights are in ``dtype``; where that does not reach as far as the grid, they are the nearest value of the grid that it has, or its
        largest.
        """
        found = []
        limit = torch.finfo(dtype).max
        for index, (quantizer, qparams) in enumerate(zip(self._quantizers, self.qparams(scales), strict=True)):
            values = qt[:, self._slice(index)].t().contiguous()
            is_beyond = bool((values.abs() > limit).any())
            # Two multiplications may differ from one by their product in the last bit; and what is cut off has another code.
            if is_beyond or not isinstance(quantizer, SingleLevelQuantizer):
                values = quantizer.dequantize(quantizer.codes_of(values.clamp_(-limit, limit), qparams), qparams)
            found.append((cast_finite(values, dtype), qparams))
        return found

    @property
    def max_magnitude(self) -> float:
        """How many scales a range reaches on either side of 0; of symmetric specs."""
        return self._stage.format.max_magnitude(self._stage.spec)

    @property
    def gap(self) -> float:
        """The largest magnitude that an element may have ÷ the next smaller one: 1.5 in FP4, 8 / 7 in INT4, hardly more than 1 in INT8."""
        far = torch.finfo(torch.float32).max
        largest = float(self._exact.round_(torch.tensor([-far, far])).abs().max())
        below = self._exact.round_(torch.linspace(-largest, largest, _PROBES)).abs()
        return largest / float(below[below < largest].max())

    @property
    def can_be_refitted(self) -> bool:
        """Whether a row's scales may be anything: each is of one group of one row alone, with no zero point and no steps below it."""
        return self.fixed is None and self._stage.spec.symmetric is not False and not self.has_subscales

    def _opened(self, weight: Tensor, shared: bool) -> tuple[SingleLevelQuantizer, Tensor | None]:
        """The stage whose codes are stored, and the scale above it for each row ``[N]``, or None."""
        first = self._quantizers[0]
        if isinstance(first, SingleLevelQuantizer):
            return first, None
        assert isinstance(first, TwoLevelQuantizer | ProgressiveQuantizer)
        common = self._observer(weight) if shared else None
        outers = [q.outer_scale(common or self._observer(weight[:, self._slice(i)])) for i, q in enumerate(self._two_level())]
        each = [o.reshape(1).expand(rows) for o, rows in zip(outers, self._rows, strict=True)]
        return first.blocks if isinstance(first, TwoLevelQuantizer) else first.second, torch.cat(each)

    def _two_level(self) -> list[TwoLevelQuantizer | ProgressiveQuantizer]:
        return [q for q in self._quantizers if isinstance(q, TwoLevelQuantizer | ProgressiveQuantizer)]

    def _observer(self, weight: Tensor) -> Observer:
        observer = self._quantizers[0].observer()
        observer.observe(weight)
        return observer

    def _slice(self, index: int) -> slice:
        start = sum(self._rows[:index])
        return slice(start, start + self._rows[index])

    def _spanning(self, weight: Tensor, shared: bool) -> GroupScales:
        """Scales that span rows, by each layer's own quantizer, spread over rows and groups."""
        common = self._observer(weight) if shared else None
        count = 0
        for index in range(len(self._quantizers)):
            w = weight[:, self._slice(index)].t()
            observer = common or self._stage.observer()
            if common is None:
                observer.observe(w if self._outer is None else w / self._outer[self._slice(index), None])
            low, high = observer.range()
            start = 0 if shared else count
            count = start + low.numel()
            self._span_ranges.append((low, high))
            self._span_numbers.append(torch.arange(start, count, device=low.device).view(low.shape))
        self.spans = self._spread(self._span_numbers)
        self.group = self.columns // self.spans.shape[0]
        return self.spanning(torch.ones(count, device=weight.device))

    def spanning(self, factor: Tensor) -> GroupScales:
        """Scales that span rows, of their ranges times ``factor``, one for each of the numbers in ``spans``."""
        parts = []
        for (low, high), number in zip(self._span_ranges, self._span_numbers, strict=True):
            parts.append(self._stage.format.qparams(low * factor[number], high * factor[number], self._stage.spec))
        zeros = [q.zero_point for q in parts if q.zero_point is not None]
        return self._made(self._spread([q.scale for q in parts]), self._spread(zeros) if zeros else None, self._outer)

    def _spread(self, parts: Sequence[Tensor]) -> Tensor:
        """What each layer has for each of its scales that span rows, as one for each group and row, ``[groups, N]``."""
        spread = self._stage.granularity.expand_scale
        return torch.cat([spread(x, (rows, self.columns)).t() for x, rows in zip(parts, self._rows, strict=True)], 1).contiguous()

    def ranges(self, w: Tensor, rows: slice = ALL) -> tuple[Tensor, Tensor]:
        """Low and high ``[m, n]`` of the groups of ``w [m · group, n]``, by the spec's observer."""
        groups = w.reshape(-1, self.group, w.shape[1])
        if self._stage.observer_class.is_extremes:
            if self._stage.spec.symmetric is not False:
                high = groups.abs().amax(1)
                return -high, high
            return groups.amin(1), groups.amax(1)
        observer = self._stage.observer_class(self._stage.spec, PerGroup(self.group))
        outer = 1 if self._outer is None else self._outer[rows]
        observer.observe((w / outer).t())
        low, high = (x.reshape(w.shape[1], -1).t() * outer for x in observer.range())
        return low.contiguous(), high.contiguous()

    def _made(self, stored: Tensor, zero: Tensor | None, outer: Tensor | None) -> GroupScales:
        scale = stored.float() if outer is None else stored.float() * outer
        return GroupScales(scale, 1 / scale if self._by_reciprocal else None, zero, stored)

    @property
    def format(self) -> NumberFormat:
        """Whose codes are stored."""
        return self._stage.format


def _picked(x: Tensor | None, which: list[int]) -> list[Tensor] | None:
    """Rows of ``x``, views of it, in that order."""
    if x is None:
        return None
    rows = x.unbind(0)
    return [rows[i] for i in which]
