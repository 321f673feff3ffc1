"""`FusedRounding` rounds or decodes a tensor in one kernel, if the device and the number format have kernels.

If there is no kernel, `quark.numbers.single_level` does the same arithmetic with torch operations. On a CPU,
kernels and torch operations give the same bits. Normally no kernel is used on a CPU, and finding this out
takes hardly any time.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from quark.numbers.kernels import DeviceCode, Runs, uses_kernels
from quark.numbers.number_format import QParams

if TYPE_CHECKING:
    from quark.numbers.kernels.rounding import Finding
    from quark.numbers.single_level import SingleLevelQuantizer

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_RUNS = 1 << 30
"""Maximum number of runs in a tensor. Kernels number the runs with 32 bits."""


@attrs.frozen(eq=False)
class RelativeScales:
    """Parameters of the formula for two-level scales.

    A scale is ``round(high / (outer · largest))``, or 1 if this result is 0. ``high`` is the largest
    magnitude among the elements that share the scale.

    Attributes:
        level: The quantizer of the scales.
        outer: The outer scale ``[]``.
        largest: The largest magnitude that an element can have.
        in_one_division: Whether to divide once, as in the formula above. If not, the formula divides twice:
            ``round(high / largest / outer)``.
    """

    level: SingleLevelQuantizer
    outer: Tensor
    largest: float
    in_one_division: bool


@attrs.frozen(eq=False)
class FusedRounding:
    """The kernel that rounds tensors of one shape with the quantizer of one level.

    Attributes:
        level: The quantizer of the level.
        code: The arithmetic of the level's number format.
        runs: The rule that maps an element of the tensor to its scale.
    """

    level: SingleLevelQuantizer
    code: DeviceCode
    runs: Runs

    @property
    def encodes(self) -> bool:
        """Whether the kernel can write codes."""
        return self.code.encode is not None

    @property
    def finds_scales(self) -> bool:
        """Whether the kernel can also compute the scales.

        The kernel computes a scale from the smallest and the largest value of a run. For this, the run must
        fit into one tile.
        """
        from quark.numbers.kernels.rounding import LONGEST_RUN

        is_own = self.runs.have_own_scales and self.runs.length <= LONGEST_RUN
        return is_own and self.code.scales is not None and self.level.observer_class.is_extremes

    def rounded(self, x: Tensor, qparams: QParams, out: Tensor) -> Tensor:
        """Round ``x`` with the scales ``qparams``, write the values to ``out``, and return ``out``.

        ``out`` may be the same tensor as ``x``.
        """
        self._launch(x, out, qparams)
        return out

    def codes(self, x: Tensor, qparams: QParams, out: Tensor) -> Tensor:
        """Write the codes of ``x`` for the scales ``qparams`` to ``out``, and return ``out``."""
        self._launch(x, out.view(torch.uint8) if out.is_floating_point() else out, qparams, encode=True)
        return out

    def decoded(self, codes: Tensor, qparams: QParams, out: Tensor) -> Tensor:
        """Write the values of one-byte codes to ``out``, and return ``out``."""
        table = _values_of_bytes(self.level, codes.device)
        self._launch(codes.view(torch.uint8), out, qparams, table=table)
        return out

    def found(self, x: Tensor, out: Tensor | None = None, under: RelativeScales | None = None) -> QParams:
        """Compute the scales of ``x``, and return them. If ``out`` is set, write the rounded values of ``x``
        to it.

        ``out`` may be the same tensor as ``x``. If ``under`` is set, the scales are those of a two-level
        quantizer.
        """
        from quark.numbers.kernels.rounding import Finding

        shape = self.level.granularity.scale_shape(tuple(x.shape))
        is_symmetric = self.level.spec.symmetric is not False
        if under is None:
            assert self.code.scales is not None
            finding = Finding(scales=self.code.scales, zeros=self.code.zeros, parameters=self.code.parameters, is_symmetric=is_symmetric)
            dtypes = _dtypes(self.level)
            scale, zero = (None if dtype is None else torch.empty(shape, dtype=dtype, device=x.device) for dtype in dtypes)
            assert scale is not None
            qparams = QParams(scale, zero)
        else:
            code = device_code(under.level)
            assert code is not None
            finding = Finding(
                scales=code.round,
                zeros=None,
                parameters=code.parameters,
                is_symmetric=is_symmetric,
                largest=under.largest,
                in_one_division=under.in_one_division,
            )
            qparams = QParams(torch.empty(shape, dtype=torch.float32, device=x.device), None, under.outer)
        self._launch(x, out, qparams, finding=finding)
        return qparams

    def _launch(
        self,
        x: Tensor,
        out: Tensor | None,
        qparams: QParams,
        *,
        encode: bool = False,
        finding: Finding | None = None,
        table: Tensor | None = None,
    ) -> None:
        from quark.numbers.kernels.rounding import launch

        room = out if out is None or out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        scales = [None if s is None else s.contiguous() for s in (qparams.scale, qparams.zero_point, qparams.outer_scale)]
        by_reciprocal = self.level.format.by_reciprocal(self.level.spec)
        launch(self.code, x.contiguous(), room, scales, self.runs, by_reciprocal=by_reciprocal, encode=encode, finding=finding, table=table)
        if out is not None and room is not None and room is not out:
            out.copy_(room)


def fused_rounding(level: SingleLevelQuantizer, x: Tensor) -> FusedRounding | None:
    """Return the kernel that rounds ``x``, or None if torch operations round it."""
    return _fused(level, x) if uses_kernels(x.device) and x.dtype in _DTYPES else None


def fused_decoding(level: SingleLevelQuantizer, codes: Tensor, out: Tensor) -> FusedRounding | None:
    """Return the kernel that writes the values of codes to ``out``, or None if torch operations do this."""
    return _fused(level, codes) if uses_kernels(codes.device) and codes.dtype.itemsize == 1 and out.dtype in _DTYPES else None


def _fused(level: SingleLevelQuantizer, x: Tensor) -> FusedRounding | None:
    code, runs = device_code(level), level.granularity.runs(tuple(x.shape))
    if code is None or runs is None or level.is_float or x.numel() == 0:
        return None
    return FusedRounding(level, code, runs) if x.numel() // runs.length < _MOST_RUNS else None


@lru_cache(maxsize=1024)  # quantizers are hashed by identity, and equal specs share one
def device_code(level: SingleLevelQuantizer) -> DeviceCode | None:
    """Return the device code of the level's number format for the level's spec, or None if the format has
    none."""
    return level.format.device_code(level.spec)


@lru_cache(maxsize=1024)
def _values_of_bytes(level: SingleLevelQuantizer, device: torch.device) -> Tensor:
    """Decode each of the bytes 0 to 255 as a code, and return the float32 values ``[256]``.

    The values are in units of the scale.
    If the format has fewer than 8 bits, only the lowest bits of a byte are decoded.
    """
    codes, dtype = torch.arange(256, dtype=torch.uint8), level.format.storage_dtype
    if dtype is torch.uint8:
        codes.bitwise_and_((1 << math.ceil(level.format.bits)) - 1)
    return level.format.decode(codes.view(dtype)).to(device)


@lru_cache(maxsize=1024)
def _dtypes(level: SingleLevelQuantizer) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype of a level's scales and the dtype of the level's zero points.

    The second dtype is None if the level has no zero points.
    """
    qparams = level.format.qparams(torch.zeros(1, dtype=torch.float32), torch.ones(1, dtype=torch.float32), level.spec)
    return qparams.scale.dtype, None if qparams.zero_point is None else qparams.zero_point.dtype
