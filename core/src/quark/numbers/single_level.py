"""`SingleLevelQuantizer` quantizes a tensor as a spec of one level says, with any format and granularity.

The quantizer divides ``x`` by the scale. The format rounds the result, and the quantizer multiplies it by the
scale again. All steps compute in float32, whatever the dtype of the tensor is. They process tiles that stay
in the cache, so that each element is read from memory and written to memory only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor

from quark.base.parallel import parallel_map
from quark.config.tensor import QTensorConfig
from quark.numbers.granularity import Granularity, PerTensor
from quark.numbers.kernel_rounding import fused_decoding, fused_rounding
from quark.numbers.number_format import NumberFormat, QParams
from quark.numbers.observer import Observer
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.numbers.tiles import CHUNK_ELEMENTS, in_parts, keep_finite_, scratch

TILE_ELEMENTS = 1 << 18
"""Float32 elements of a tile: 1 MiB, about a second-level cache of current processors.

Smaller tiles fit better into the cache, but the additional operations take longer than that saves.
"""

MOST_STEPS = 256
"""Maximum number of steps from 0 to a value at which float32 arithmetic is exact enough for
`SingleLevelQuantizer.recovers_codes`.
"""

Tile = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Source ``[rows, elements]``, result ``[rows, elements]``, scales ``[rows, 1]``, factors or divisors
``[rows, 1]``, and zero points or None."""


@attrs.frozen(eq=False)
class SingleLevelQuantizer(TensorQuantizer):
    """A quantizer with one level. `quark.numbers.TensorQuantizer` documents the methods.

    Attributes:
        spec: The canonical spec.
        granularity: Which elements share a scale.
        format: The number format.
        observer_class: The class of the observer that computes ranges.
    """

    spec: QTensorConfig
    granularity: Granularity
    format: NumberFormat
    observer_class: type[Observer]

    @property
    def is_float(self) -> bool:
        """Whether the format has no scales, so that this quantizer only casts."""
        return self.format.is_cast

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the whole tensor has one scale. The layers of an input group may share this scale.

        If the format has a table, the result is False.
        """
        return isinstance(self.granularity, PerTensor) and not self.is_float and self.format.table_shape is None

    @property
    def levels(self) -> tuple[SingleLevelQuantizer, ...]:
        """The quantizer itself."""
        return (self,)

    @property
    def stored_level(self) -> SingleLevelQuantizer:
        """The quantizer itself."""
        return self

    @property
    def has_one_product(self) -> bool:
        """Always True."""
        return True

    def outer_scale(self, x: Tensor, shared: Observer | None = None) -> Tensor | None:
        return None

    def scales_from_ranges(self, low: Tensor, high: Tensor, outer: Tensor | None, *, observed: bool = False) -> QParams:
        return self.format.qparams(low, high, self.spec)

    def shape_error(self, shape: tuple[int, ...]) -> str | None:
        error = self.format.spec_error(self.spec) or self.observer_class.spec_error(self.spec) or self.granularity.shape_error(shape)
        if error is None and self.format.table_shape is not None and len(shape) != 2:
            return f"of shape {list(shape)} is not a matrix, but {self.format.name} can learn a table only from a matrix"
        return error or self._vector_error(shape)

    def _vector_error(self, shape: tuple[int, ...]) -> str | None:
        """Return why the format cannot round vectors of a tensor with shape ``shape``, or None if it can."""
        vector, columns = self.format.vector, shape[-1] if shape else 1
        if vector == 1:
            return None
        if len(shape) == 2:
            scale = torch.empty(self.granularity.scale_shape(shape), device="meta")
            columns //= self.granularity.expand_scale(scale, shape).shape[1]
        if columns % vector == 0:
            return None
        return (
            f"of shape {list(shape)} has one scale for every {columns} elements of a row, which is not a multiple of the {vector} elements "
            f"that {self.format.name} rounds together"
        )

    def observer(self) -> Observer:
        return self.observer_class(self.spec, self.granularity)

    def qparams_from(self, observer: Observer) -> QParams:
        low, high = observer.range()
        return self.format.qparams(low, high, self.spec)

    def find_qparams(self, x: Tensor, shared: Observer | None = None) -> QParams:
        if shared is not None:
            return self.qparams_from(shared)
        if x.numel() == 0:
            return self.empty_qparams(tuple(x.shape), str(x.device))
        if self.format.table_shape is not None:
            return self.with_learned_table(x, self._observed(x))
        if (fused := fused_rounding(self, x)) is not None and fused.finds_scales:
            return fused.found(x)
        if self.granularity.is_local and not self.is_float and x.numel() > CHUNK_ELEMENTS:
            return in_parts(x, x, self.granularity.scale_shape(tuple(x.shape)), lambda part, _: self._observed(part))
        return self._observed(x)

    def with_learned_table(self, x: Tensor, qparams: QParams, importance: Tensor | None = None) -> QParams:
        """Return ``qparams`` and the table that the format learns for the weight ``x``.

        If the format has no table, return ``qparams`` unchanged.

        Args:
            x: The weight ``[O, I]``.
            qparams: The scales of the weight.
            importance: The second moments ``[I]`` of the input channels, or any multiple of them. If it is
                None, all channels have the same weight.
        """
        if self.format.table_shape is None:
            return qparams
        shape = tuple(x.shape)
        expanded = self.granularity.expand_scale(qparams.scale.float(), shape)
        scale = expanded.repeat_interleave(x.shape[1] // expanded.shape[1], 1)
        squares = (scale / scale.nan_to_num(0.0, 0.0).amax()).square()  # a NaN scale must not change other rows
        table = self.format.learned_table(x.float() / scale, squares if importance is None else squares * importance.to(squares))
        return attrs.evolve(qparams, table=table)

    def _format(self, qparams: QParams) -> NumberFormat:
        """Return the number format for ``qparams``.

        If ``qparams`` has a table, the format uses the values of that table.
        """
        return self.format if qparams.table is None else self.format.with_table(qparams.table)

    def _observed(self, x: Tensor) -> QParams:
        observer = self.observer()
        observer.observe(x)
        return self.qparams_from(observer)

    def round_to_nearest(self, x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, QParams]:
        fused = fused_rounding(self, x)
        if fused is not None and fused.finds_scales:
            result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
            return result, fused.found(x, result)
        is_whole = fused is not None or self.is_float or not self.granularity.is_local or self.format.table_shape is not None
        if is_whole or x.numel() == 0 or not (out is None or out.is_contiguous()):
            qparams = self.find_qparams(x)
            return self.fake_quantize(x, qparams, out=out), qparams
        result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        return result, in_parts(x, result, self.granularity.scale_shape(tuple(x.shape)), self._round_part)

    def _round_part(self, x: Tensor, out: Tensor) -> QParams:
        qparams, rows = self._observed(x), self.granularity.rows(out)
        self._round_tiles(self.format, True, self._tiles(x, rows, qparams))
        self._put_back(rows, out)
        return qparams

    def fake_quantize(self, x: Tensor, qparams: QParams | None = None, *, out: Tensor | None = None) -> Tensor:
        if self.is_float:
            cast = self.format.decode(self.format.encode(x)).to(x.dtype)
            return cast if out is None else out.copy_(cast)
        if qparams is None:
            return self.round_to_nearest(x, out=out)[0]
        result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        if (fused := fused_rounding(self, x)) is not None:
            return fused.rounded(x, qparams, result)
        return self._rounded(x, qparams, result, rescale=True)

    def in_scales(self, x: Tensor, qparams: QParams) -> Tensor:
        """Return the rounded values of ``x`` in units of the scales, as float32 values.

        The spec must be symmetric.
        """
        return self._rounded(x, qparams, torch.empty(x.shape, dtype=torch.float32, device=x.device), rescale=False)

    def _rounded(self, x: Tensor, qparams: QParams, result: Tensor, *, rescale: bool) -> Tensor:
        return self._filled(x, result, qparams, partial(self._round_tiles, self._format(qparams), rescale))

    def _round_tiles(self, number_format: NumberFormat, rescale: bool, tiles: Iterable[Tile]) -> None:
        for source, place, scale, factor, zero in tiles:
            # A float32 result is its own scratch memory for scaled values: one tile less in the cache.
            has_room = place.dtype is torch.float32 and place.is_contiguous() and place.storage_offset() % 2 == 0
            t = number_format.round_(self._scaled(source, factor, place if has_room else _room(source)), zero)
            if zero is not None:
                t.sub_(zero)
            if rescale:
                t.mul_(scale)
            keep_finite_(t if t is place else place.copy_(t))

    def quantize(self, x: Tensor, qparams: QParams) -> Tensor:
        if self.is_float:
            return self.format.encode(x)
        result = torch.empty(x.shape, dtype=self.format.storage_dtype, device=x.device)
        if x.is_meta:
            return result
        if (fused := fused_rounding(self, x)) is not None and fused.encodes:
            return fused.codes(x, qparams, result)

        is_narrow = x.dtype is not torch.float32 and self.format.writes_codes_of(x.dtype) and self.format.by_reciprocal(self.spec)
        dtype = x.dtype if is_narrow and _are_powers_of_two(qparams) else torch.float32
        number_format = self._format(qparams)

        def work(tiles: Sequence[Tile]) -> None:
            for source, place, _, factor, zero in tiles:
                room = scratch(source.shape, dtype, source.device, "scaled values")
                number_format.write_codes(self._scaled(source, factor.to(dtype), room), zero, place)

        return self._filled(x, result, qparams, work)

    def recovers_codes(self, dtype: torch.dtype, qparams: QParams) -> bool:
        spacing = self.format.spacing(self.spec)
        has_real_zero = qparams.zero_point is not None and qparams.zero_point.is_floating_point()
        if self.is_float or spacing is None or has_real_zero or qparams.scale.numel() == 0:
            return False
        limits, outer = torch.finfo(dtype), 1.0 if qparams.outer_scale is None else qparams.outer_scale.float()
        low, high = (float(end) for end in torch.aminmax(qparams.scale.float() * outer))
        # The cast moves a value of at most 1 / eps steps, normal and finite, by less than half a step. Errors
        # of float32 are negligible beside that.
        is_fine = spacing.steps <= min(1 / limits.eps, MOST_STEPS)
        return is_fine and low * spacing.smallest >= limits.tiny and high * spacing.largest <= limits.max

    def dequantize(self, codes: Tensor, qparams: QParams) -> Tensor:
        if self.is_float:
            return self.format.decode(codes)
        result = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        self.dequantize_to(codes, qparams, result)
        return result

    def dequantize_to(self, codes: Tensor, qparams: QParams, out: Tensor) -> None:
        if self.is_float:
            super().dequantize_to(codes, qparams, out)
            return
        if (fused := fused_decoding(self, codes, out)) is not None:
            fused.decoded(codes, qparams, out)
            return
        number_format = self._format(qparams)

        def work(tiles: Sequence[Tile]) -> None:
            for source, place, scale, _, zero in tiles:
                t = number_format.decode(source)
                is_room = place.dtype is torch.float32 and place.is_contiguous()
                values = torch.mul(t if zero is None else t - zero, scale, out=place if is_room else _room(source))
                if not is_room:
                    keep_finite_(place.copy_(values))

        self._filled(codes, out, qparams, work)

    def pack_qparams(self, qparams: QParams, *, order: str = "reorder") -> dict[str, Tensor]:
        return {} if self.is_float else self.format.packing.pack_qparams(qparams, self.spec, self.granularity, order)

    def unpack_qparams(self, tensors: dict[str, Tensor], shape: tuple[int, ...], *, order: str = "reorder") -> QParams:
        if self.is_float:
            return QParams(torch.ones((), dtype=torch.float32))
        return self.format.packing.unpack_qparams(tensors, self.spec, self.granularity, order, shape)

    def empty_qparams(self, shape: tuple[int, ...], device: str) -> QParams:
        zeros = torch.zeros(self.granularity.scale_shape(shape), dtype=torch.float32, device=device)
        qparams, shape_of_table = self.format.qparams(zeros, zeros, self.spec), self.format.table_shape
        if shape_of_table is None:
            return qparams
        return attrs.evolve(qparams, table=torch.zeros(shape_of_table, dtype=torch.float32, device=device))

    def _filled(self, x: Tensor, result: Tensor, qparams: QParams, work: Callable[[Sequence[Tile]], None]) -> Tensor:
        """Fill ``result`` tile by tile, and return ``result``.

        Several threads call ``work``, each with a part of the tiles.
        """
        rows = self.granularity.rows(result)
        tiles = list(self._tiles(x, rows, qparams))
        count = max(1, CHUNK_ELEMENTS // max(TILE_ELEMENTS, 1))
        parallel_map(work, [tiles[i : i + count] for i in range(0, len(tiles), count)], x.device)
        self._put_back(rows, result)
        return result

    def _put_back(self, rows: Tensor, result: Tensor) -> None:
        """Copy ``rows`` into ``result`` if ``rows`` is not a view of ``result``."""
        if rows.data_ptr() != result.data_ptr():
            result.copy_(self.granularity.restore(rows, tuple(result.shape)))

    def _scaled(self, source: Tensor, factor: Tensor, out: Tensor) -> Tensor:
        """Divide ``source``, the elements of one tile, by the scales. Write the result to ``out`` and return
        it.

        ``factor`` contains the scales, or their reciprocals if the format multiplies by them.
        """
        # If dtypes differ, torch would allocate a converted operand.
        values = out.copy_(source) if source.dtype.itemsize < out.dtype.itemsize else source
        return torch.mul(values, factor, out=out) if self.format.by_reciprocal(self.spec) else torch.div(values, factor, out=out)

    def _tiles(self, x: Tensor, target: Tensor, qparams: QParams) -> Iterator[Tile]:
        """Yield the tiles of ``x`` and ``target``. The matrix ``target`` has one row for each scale."""
        if x.numel() == 0:
            return
        rows = self.granularity.rows(x)
        scale = qparams.scale.reshape(-1, 1).float()
        if qparams.outer_scale is not None:
            scale = scale * qparams.outer_scale
        factor = scale.reciprocal() if self.format.by_reciprocal(self.spec) else scale
        zero = None if qparams.zero_point is None else qparams.zero_point.reshape(-1, 1)
        count, length = rows.shape
        size = TILE_ELEMENTS // self.format.vector * self.format.vector if x.device.type == "cpu" else x.numel()
        high = max(1, size // length)
        for top in range(0, count, high):
            part = slice(top, top + high)
            # A row that is longer than a tile (per tensor) is cut along its length.
            for left in range(0, length, size):
                place = slice(left, left + size)
                yield rows[part, place], target[part, place], scale[part], factor[part], None if zero is None else zero[part]


def _are_powers_of_two(qparams: QParams) -> bool:
    """Return whether all scales are powers of two.

    If all of them are, the scaled values have the same mantissas as the tensor.
    """
    if qparams.outer_scale is not None or qparams.scale.dtype is not torch.float32:
        return False
    return not bool((qparams.scale.contiguous().view(torch.int32) & 0x7FFFFF).any())


def _room(tile: Tensor) -> Tensor:
    """Return scratch memory for the scaled values of a tile."""
    return scratch(tile.shape, torch.float32, tile.device, "scaled values")
