"""`PackedWeight` is a weight in the form in which its checkpoint stores it. It is dequantized again for each
use.

This module works for every number format and layout, because a `WeightPacking` packs and unpacks the tensors.
If only some rows of a weight are unpacked, the code here must find out which elements of the stored tensors
belong to these rows. For this, it compares the shapes of packed meta tensors of different sizes, and checks
the result once with a random weight. If a weight cannot be divided by rows, the whole weight is unpacked. A
part of a weight, such as the part of one rank in tensor parallelism, is a `PackedWeight` too, with the
tensors and the shape of the part.
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
"""Maximum number of elements that one CPU thread unpacks at a time. Smaller slices would fit into a
second-level cache, but the additional calls cost more time than the cache saves.
"""


class WeightPacking(Protocol):
    """The protocol of objects that pack the codes and scales of a weight into stored tensors, and unpack
    stored tensors.

    Two objects that pack in the same way must compare equal and have the same hash.
    """

    def __hash__(self) -> int: ...

    @property
    def quantizer(self) -> TensorQuantizer:
        """The quantizer of the weight."""

    def pack(self, codes: Tensor, qparams: QParams) -> dict[str, Tensor]:
        """Return a dictionary from name to stored tensor. This must also work for meta tensors."""

    def unpack(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, QParams]:
        """Return the codes and scales of a weight with the shape ``shape``. This is the inverse of `pack`."""

    def qparams(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QParams:
        """Return only the scales and zero points of a weight with the shape ``shape``."""


_CHECKED = 1 << 20
"""Maximum number of elements of the slices of a weight in which scales are checked. The number is small
because the check runs between the allocations of two layers. The memory that the check frees is then too
small for tensors of later layers."""


@attrs.frozen
class FormatPacking:
    """A `WeightPacking` that packs in the way that the number format of the weight defines.

    The names of its tensors are the suffixes that checkpoints use. The codes have the suffix ``""``.

    Attributes:
        quantizer: Quantizer of the weight.
        order: Packing order of 4-bit codes in a word, ``"reorder"`` or ``"order"``.
        as_stored: A function that converts codes to the layout of checkpoints, and from this layout to the
            layout of the quantized layer (`quark.models.layers.QuantizedLayer.as_stored`).
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
    """A description of the rows at which a packed weight can be cut, and of the elements that each row has in
    the stored tensors.

    Attributes:
        multiple: The weight can be cut before each row whose index is a multiple of this number.
        axes: A dictionary with an entry for each stored tensor whose size depends on the number of rows. It
            maps the tensor's name to a pair: the axis that grows with the rows, and the number of elements
            along this axis for one row of the weight.
    """

    multiple: int
    axes: Mapping[str, tuple[int, Fraction]] = attrs.field(eq=False)

    def rows(self, tensors: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
        """Return a dictionary from name to stored tensor for the rows in the slice ``rows``. The tensors are
        contiguous.

        The slice must begin at a multiple of `multiple`.
        """
        cut = dict(tensors)
        for name, (axis, ratio) in self.axes.items():
            first, last = int(rows.start * ratio), math.ceil(rows.stop * ratio)
            cut[name] = tensors[name].narrow(axis, first, last - first).contiguous()
        return cut

    def chosen(self, tensors: Mapping[str, Tensor], parts: Tensor) -> dict[str, Tensor]:
        """Return a dictionary from name to stored tensor for some parts of the weight.

        A part has `multiple` rows. ``parts`` is an int64 tensor with the indices of the parts. The parts are
        concatenated in this order.
        """
        cut = dict(tensors)
        for name, (axis, ratio) in self.axes.items():
            size = int(self.multiple * ratio)
            places = parts[:, None] * size + torch.arange(size, device=parts.device)
            # The last part may have fewer rows. Its last element is then repeated, and callers do not use
            # these rows.
            cut[name] = tensors[name].index_select(axis, places.flatten().clamp_(max=tensors[name].shape[axis] - 1))
        return cut


_PROBE = 1024
"""Number of rows of the meta weights that are packed to find the cuts. It is a multiple of the number of rows
that any format packs into one word.
"""


@lru_cache(maxsize=1024)
def row_cuts(packing: WeightPacking, columns: int) -> RowCuts | None:
    """Return the `RowCuts` of a packed weight that has ``columns`` columns.

    Return None if such a weight cannot be cut.
    """
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
    """Check ``cuts`` with a packed random matrix of ``columns`` columns.

    Return whether the parts of the packed matrix unpack to the same rows as the whole matrix.
    """
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
        packing: The object that unpacks the tensors.
        tensors: A dictionary from name to stored tensor. All tensors are on one device.
        shape: Shape of the weight, ``[out, in]`` for linear layers.
        dtype: Dtype of the dequantized weight.
        name: Full name of the layer, for messages.
    """

    packing: WeightPacking
    tensors: Mapping[str, Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = "a weight"

    @property
    def cuts(self) -> RowCuts | None:
        """The rows at which the weight can be cut, or None if the weight can only be unpacked as a whole."""
        return row_cuts(self.packing, self.shape[1]) if len(self.shape) == 2 else None

    @property
    def device(self) -> torch.device:
        """The device of the stored tensors."""
        return next(iter(self.tensors.values())).device

    def check(self) -> None:
        """Raise CheckpointError if a scale of the weight is not valid.

        The method does not read the codes if the scales are stored in separate tensors.
        """
        if not all(map(self._has_valid_scales, self.row_slices(_CHECKED))):
            refuse_bad_scales(self.packing.qparams(self.tensors, self.shape), f"the weight of '{self.name}'", activation=False)

    def _has_valid_scales(self, rows: slice) -> bool:
        """Return whether the scales of ``rows`` are positive and finite.

        The result is also False if the scales cannot be unpacked without the codes.
        """
        codes = max(self.tensors, key=lambda name: self.tensors[name].nbytes)
        part = attrs.evolve(self, tensors={**self.tensors, codes: self.tensors[codes].to("meta")}).part(rows)
        try:
            qparams = self.packing.qparams(part.tensors, part.shape)
            ends = [scale.float().aminmax() for scale in (qparams.scale, qparams.outer_scale) if scale is not None and scale.numel()]
            return all(float(low) > 0 and float(high) < math.inf for low, high in ends)
        except Exception:  # a layout may fail if codes and scales are on different devices
            return False

    def codes(self) -> tuple[Tensor, QParams]:
        """Return the unpacked codes and scales."""
        return self.packing.unpack(self.tensors, self.shape)

    def row_slices(self, elements: int, multiple: int = 1) -> list[slice]:
        """Return slices of the weight's rows, each with at most ``elements`` elements.

        If the weight cannot be cut, return one slice with all rows.

        Args:
            elements: Maximum number of elements of a slice. If even the smallest possible slice has more
                elements, all slices have the size of the smallest possible slice.
            multiple: A number. The number of rows of each slice, except the last slice, is a multiple of it.
        """
        rows, cuts = self.shape[0], self.cuts
        if cuts is None:
            return [slice(0, rows)]
        unit = math.lcm(cuts.multiple, multiple)
        parts = row_slices(-(-rows // unit), unit * self.shape[1], elements)
        return [slice(p.start * unit, min(p.stop * unit, rows)) for p in parts]

    def part(self, rows: slice) -> PackedWeight:
        """Return the part of the weight with the rows ``rows``, a slice that `row_slices` has returned."""
        if rows == slice(0, self.shape[0]) or self.cuts is None:
            return self
        shape = (rows.stop - rows.start, *self.shape[1:])
        return attrs.evolve(self, tensors=self.cuts.rows(self.tensors, rows), shape=shape)

    @torch.no_grad()
    def values(self, out: Tensor | None = None) -> Tensor:
        """Return the dequantized weight. It equals the weight of the unpacked layer bit for bit.

        Args:
            out: A tensor into which the weight is written. The result has the dtype of this tensor. If None,
                a new tensor is allocated.
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
        """Return the rows at ``indices`` as a tensor with the shape ``[*indices.shape, in]``.

        If the weight can be cut, only the parts that contain these rows are unpacked, and each part is
        unpacked once.
        """
        cuts = self.cuts
        if cuts is None:
            return self.values()[indices]
        indices = indices.long()
        parts, place = (indices // cuts.multiple).unique(return_inverse=True)
        shape = (len(parts) * cuts.multiple, *self.shape[1:])
        rows = attrs.evolve(self, tensors=cuts.chosen(self.tensors, parts), shape=shape).values()
        return rows[place * cuts.multiple + indices % cuts.multiple]


def weight_room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor into which a weight can be dequantized. All layers on a device share its
    memory.

    A thread may use the tensor until it calls this function again. This is enough, because a layer has
    finished its computation before the next layer is called.
    """
    return kept_room(shape, dtype, device, "the values of a weight")
