"""PackedWeight: a weight as its checkpoint stores it; its values are computed for each use.

This module knows no number format or layout: the code that packed tensors unpacks them. The shapes of packed
meta tensors show which rows of a stored tensor hold which rows of the weight; a random weight confirms this
once. A weight that cannot be cut is unpacked whole. A part of a weight, for instance of a rank in tensor
parallelism, is a `PackedWeight` with that part's tensors and shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import attrs
import torch
from torch import Tensor

from quark.base.parallel import parallel_map, row_slices
from quark.models.layers.coded_layer import refuse_bad_scales
from quark.numbers import QParams, TensorQuantizer
from quark.numbers.tiles import kept_room

SLICE_ELEMENTS = 1 << 20
"""Maximum number of elements that one CPU thread unpacks at a time. With smaller slices, which fit into a
second-level cache, the additional calls cost more time than the cache saves.
"""


class WeightPacking(Protocol):
    """Packs codes and scales of a weight to stored tensors, and unpacks them.

    It is a value: equal packings are equal and have the same hash.
    """

    def __hash__(self) -> int: ...

    @property
    def quantizer(self) -> TensorQuantizer:
        """The quantizer of the weight."""

    def pack(self, codes: Tensor, qparams: QParams) -> dict[str, Tensor]:
        """Return the stored tensors by name; also for meta tensors."""

    def unpack(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, QParams]:
        """Undo `pack` for a weight of that shape."""

    def qparams(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QParams:
        """Return only the scales."""


_CHECKED = 1 << 20
"""Number of elements of a weight whose scales are checked at a time. The number is small, because memory that
is freed between the objects of two layers is not reused for larger tensors.
"""


@attrs.frozen
class FormatPacking:
    """Packs by the number format, as a `WeightPacking`; names are suffixes, with ``""`` for the codes.

    Attributes:
        quantizer: Quantizer of the weight.
        order: Order of 4-bit codes in a word.
        as_stored: Converts codes to the layout of checkpoints, or back
            (`quark.models.layers.QuantizedLayer.as_stored`).
    """

    quantizer: TensorQuantizer
    order: str
    as_stored: Callable[[Tensor], Tensor]

    def pack(self, codes: Tensor, qparams: QParams) -> dict[str, Tensor]:
        tensors = self.quantizer.pack(codes, qparams, order=self.order)
        return {**tensors, "": self.as_stored(tensors[""])}

    def unpack(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, QParams]:
        return self.quantizer.unpack({**tensors, "": self.as_stored(tensors[""])}, shape, order=self.order)

    def qparams(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QParams:
        return self.quantizer.unpack_qparams(dict(tensors), shape, order=self.order)


@attrs.frozen
class RowCuts:
    """The places of a weight's rows in its stored tensors.

    Attributes:
        multiple: The weight can be cut before each row whose number is a multiple of this.
        axes: The axis of the rows in each stored tensor that has rows, by name, and its elements per row.
    """

    multiple: int
    axes: Mapping[str, tuple[int, Fraction]] = attrs.field(eq=False)

    def rows(self, tensors: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
        """Return the tensors of a slice of rows that begins at a `multiple`; they are contiguous."""
        cut = dict(tensors)
        for name, (axis, ratio) in self.axes.items():
            first, last = int(rows.start * ratio), math.ceil(rows.stop * ratio)
            cut[name] = tensors[name].narrow(axis, first, last - first).contiguous()
        return cut

    def chosen(self, tensors: Mapping[str, Tensor], parts: Tensor) -> dict[str, Tensor]:
        """Return the tensors of some parts of `multiple` rows; ``parts`` are their numbers, int64."""
        cut = dict(tensors)
        for name, (axis, ratio) in self.axes.items():
            size = int(self.multiple * ratio)
            places = parts[:, None] * size + torch.arange(size, device=parts.device)
            # The last part may be shorter; the repeated elements belong to no row of the weight.
            cut[name] = tensors[name].index_select(axis, places.flatten().clamp_(max=tensors[name].shape[axis] - 1))
        return cut


_PROBE = 1024
"""Rows of the weight whose packed meta tensors show where to cut; a multiple of the rows in any word."""


@lru_cache(maxsize=1024)
def row_cuts(packing: WeightPacking, columns: int) -> RowCuts | None:
    """Return where a packed weight with that number of columns can be cut; None if it cannot."""
    quantizer = packing.quantizer
    probe = _PROBE * quantizer.granularity.rows_per_scale
    small, large = (packing.pack(*quantizer.empty_codes((rows, columns))) for rows in (probe, 2 * probe))
    axes: dict[str, tuple[int, Fraction]] = {}
    for name, tensor in small.items():
        other = large[name]
        grown = [i for i, (a, b) in enumerate(zip(tensor.shape, other.shape, strict=True)) if a != b]
        if len(grown) > 1 or any(other.shape[i] != 2 * tensor.shape[i] for i in grown):
            return None
        if grown:
            axes[name] = grown[0], Fraction(tensor.shape[grown[0]], probe)
    cuts = RowCuts(math.lcm(*(ratio.denominator for _, ratio in axes.values())), axes)
    return cuts if axes and _cuts_agree(packing, cuts, columns) else None


@torch.no_grad()
def _cuts_agree(packing: WeightPacking, cuts: RowCuts, columns: int) -> bool:
    """Return whether the parts of a packed matrix unpack to the parts of its values."""
    rows = cuts.multiple * max(3, 64 // cuts.multiple)
    with torch.device("cpu"), torch.inference_mode(False):
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        quantizer = packing.quantizer
        qparams = quantizer.find_qparams(weight)
        tensors = packing.pack(quantizer.quantize(weight, qparams), qparams)
        expected = quantizer.dequantize(*packing.unpack(tensors, (rows, columns)))
        for start in range(0, rows, cuts.multiple):
            part = slice(start, start + cuts.multiple)
            try:
                values = quantizer.dequantize(*packing.unpack(cuts.rows(tensors, part), (cuts.multiple, columns)))
            except Exception:  # a layout may store more than rows, such as the shape of a weight
                return False
            if not torch.equal(values, expected[part]):
                return False
    return True


@attrs.frozen(eq=False)
class PackedWeight:
    """A weight with only its stored tensors in memory.

    Attributes:
        packing: How its tensors are packed.
        tensors: The stored tensors by name, on one device.
        shape: Shape of the weight, ``[out, in]`` for linear layers.
        dtype: Dtype of its values, as in the unpacked layer.
        name: Full name, for messages.
    """

    packing: WeightPacking
    tensors: Mapping[str, Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = "a weight"

    @property
    def cuts(self) -> RowCuts | None:
        """Where it can be cut; None if it is only unpacked whole."""
        return row_cuts(self.packing, self.shape[1]) if len(self.shape) == 2 else None

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return next(iter(self.tensors.values())).device

    def check(self) -> None:
        """Raise CheckpointError unless its scales are valid.

        Codes are not read if scales are stored separately.
        """
        if not all(map(self._has_valid_scales, self.row_slices(_CHECKED))):
            refuse_bad_scales(self.packing.qparams(self.tensors, self.shape), f"the weight of '{self.name}'", activation=False)

    def _has_valid_scales(self, rows: slice) -> bool:
        """Return whether the scales of some rows are positive and finite; False if only codes could tell."""
        codes = max(self.tensors, key=lambda name: self.tensors[name].nbytes)
        part = attrs.evolve(self, tensors={**self.tensors, codes: self.tensors[codes].to("meta")}).part(rows)
        try:
            qparams = self.packing.qparams(part.tensors, part.shape)
            ends = [scale.float().aminmax() for scale in (qparams.scale, qparams.outer_scale) if scale is not None and scale.numel()]
            return all(float(low) > 0 and float(high) < math.inf for low, high in ends)
        except Exception:  # a layout may fail if codes and scales are on different devices
            return False

    def codes(self) -> tuple[Tensor, QParams]:
        """Return codes and scales."""
        return self.packing.unpack(self.tensors, self.shape)

    def row_slices(self, elements: int, multiple: int = 1) -> list[slice]:
        """Return slices of its rows with up to that number of elements each, if it can be cut.

        Args:
            elements: Maximum size of a slice. A slice is larger if no smaller one can be cut.
            multiple: Divisor of the number of rows of each slice but the last.
        """
        rows, cuts = self.shape[0], self.cuts
        if cuts is None:
            return [slice(0, rows)]
        unit = math.lcm(cuts.multiple, multiple)
        parts = row_slices(-(-rows // unit), unit * self.shape[1], elements)
        return [slice(p.start * unit, min(p.stop * unit, rows)) for p in parts]

    def part(self, rows: slice) -> PackedWeight:
        """Return a slice of its rows, from `row_slices`."""
        if rows == slice(0, self.shape[0]) or self.cuts is None:
            return self
        shape = (rows.stop - rows.start, *self.shape[1:])
        return attrs.evolve(self, tensors=self.cuts.rows(self.tensors, rows), shape=shape)

    @torch.no_grad()
    def values(self, out: Tensor | None = None) -> Tensor:
        """Return the values; they equal the values of the unpacked layer, to the bit.

        Args:
            out: Receives the values, in its shape and dtype; None uses fresh memory.
        """
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device) if out is None else out

        def unpack(rows: slice) -> None:
            self.packing.quantizer.dequantize_to(*self.part(rows).codes(), result[rows])

        elements = math.prod(self.shape)
        if self.device.type == "cpu":
            elements = min(SLICE_ELEMENTS, max(elements // (4 * torch.get_num_threads()), SLICE_ELEMENTS >> 3))
        parallel_map(unpack, self.row_slices(elements), self.device)
        return result

    @torch.no_grad()
    def looked_up(self, indices: Tensor) -> Tensor:
        """Return the rows at ``indices``, ``[*indices.shape, in]``; only these are unpacked, each once."""
        cuts = self.cuts
        if cuts is None:
            return self.values()[indices]
        indices = indices.long()
        parts, place = (indices // cuts.multiple).unique(return_inverse=True)
        shape = (len(parts) * cuts.multiple, *self.shape[1:])
        rows = attrs.evolve(self, tensors=cuts.chosen(self.tensors, parts), shape=shape).values()
        return rows[place * cuts.multiple + indices % cuts.multiple]


def weight_room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory for the values of a weight, which all layers on a device share.

    It is valid until the thread asks again: a layer finishes before the next one is called.
    """
    return kept_room(shape, dtype, device, "the values of a weight")
