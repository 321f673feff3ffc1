"""FusedRounding: one kernel that rounds or decodes a tensor, if device and number format have kernels.

`quark.numbers.single_level` uses it if there is one. If not, it does the same arithmetic with torch's
operations, with the same bits on CPUs. On a CPU, looking for a kernel only takes a check of the device.
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
"""Maximum number of runs: kernels count them in 32 bits."""


@attrs.frozen(eq=False)
class RelativeScales:
    """Arithmetic of two-level scales: ``round(high / (outer · largest))``, with 1 instead of 0.

    Attributes:
        level: Quantizes the scales.
        outer: The outer scale ``[]``.
        largest: Largest magnitude of an element.
        in_one_division: Whether to compute this formula; if not, ``round(high / largest / outer)``.
    """

    level: SingleLevelQuantizer
    outer: Tensor
    largest: float
    in_one_division: bool


@attrs.frozen(eq=False)
class FusedRounding:
    """The kernel of one level for tensors of one shape.

    Attributes:
        level: The quantizer.
        code: Arithmetic of its format.
        runs: Positions of its scales.
    """

    level: SingleLevelQuantizer
    code: DeviceCode
    runs: Runs

    @property
    def encodes(self) -> bool:
        """Whether it writes codes."""
        return self.code.encode is not None

    @property
    def finds_scales(self) -> bool:
        """Whether it finds scales too: from the extremes of runs that fit into a tile."""
        from quark.numbers.kernels.rounding import LONGEST_RUN

        is_own = self.runs.have_own_scales and self.runs.length <= LONGEST_RUN
        return is_own and self.code.scales is not None and self.level.observer_class.is_extremes

    def rounded(self, x: Tensor, qparams: QParams, out: Tensor) -> Tensor:
        """Fill ``out``, which may be ``x``, with the values of ``x`` under its scales, and return it."""
        self._launch(x, out, qparams)
        return out

    def codes(self, x: Tensor, qparams: QParams, out: Tensor) -> Tensor:
        """Fill ``out`` with the codes of ``x`` under its scales, and return it."""
        self._launch(x, out.view(torch.uint8) if out.is_floating_point() else out, qparams, encode=True)
        return out

    def decoded(self, codes: Tensor, qparams: QParams, out: Tensor) -> Tensor:
        """Fill ``out`` with the values of one-byte codes, and return it."""
        table = _values_of_bytes(self.level, codes.device)
        self._launch(codes.view(torch.uint8), out, qparams, table=table)
        return out

    def found(self, x: Tensor, out: Tensor | None = None, under: RelativeScales | None = None) -> QParams:
        """Return the scales of ``x``, and fill ``out``, which may be ``x``, with its values under them."""
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
    """Return the kernel that rounds ``x``; None if torch's operations do."""
    return _fused(level, x) if uses_kernels(x.device) and x.dtype in _DTYPES else None


def fused_decoding(level: SingleLevelQuantizer, codes: Tensor, out: Tensor) -> FusedRounding | None:
    """Return the kernel that writes the values of codes to ``out``; None if torch's operations do."""
    return _fused(level, codes) if uses_kernels(codes.device) and codes.dtype.itemsize == 1 and out.dtype in _DTYPES else None


def _fused(level: SingleLevelQuantizer, x: Tensor) -> FusedRounding | None:
    code, runs = device_code(level), level.granularity.runs(tuple(x.shape))
    if code is None or runs is None or level.is_float or x.numel() == 0:
        return None
    return FusedRounding(level, code, runs) if x.numel() // runs.length < _MOST_RUNS else None


@lru_cache(maxsize=1024)  # quantizers are hashed by identity, and equal specs share one
def device_code(level: SingleLevelQuantizer) -> DeviceCode | None:
    """Return the device code of a level's format under its spec."""
    return level.format.device_code(level.spec)


@lru_cache(maxsize=1024)
def _values_of_bytes(level: SingleLevelQuantizer, device: torch.device) -> Tensor:
    """Return the value of each byte as a code, in units of scales, float32 ``[256]``.

    In a narrow format, a byte that is not a code has the value of its lowest bits.
    """
    codes, dtype = torch.arange(256, dtype=torch.uint8), level.format.storage_dtype
    if dtype is torch.uint8:
        codes.bitwise_and_((1 << math.ceil(level.format.bits)) - 1)
    return level.format.decode(codes.view(dtype)).to(device)


@lru_cache(maxsize=1024)
def _dtypes(level: SingleLevelQuantizer) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtypes of a level's scales and zero points; None if it has none."""
    qparams = level.format.qparams(torch.zeros(1, dtype=torch.float32), torch.ones(1, dtype=torch.float32), level.spec)
    return qparams.scale.dtype, None if qparams.zero_point is None else qparams.zero_point.dtype
