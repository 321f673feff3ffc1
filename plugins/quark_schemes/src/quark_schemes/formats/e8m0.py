"""E8M0: powers of two from 2^-127 to 2^127 in a byte, for scales.

Source: OCP Microscaling Formats v1.0, §5.4.1.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import NumberFormat, QParams
from quark_schemes.arithmetic.shared_exponent import decode_e8m0, encode_e8m0, shared_exponent_scale

__all__ = ["FP8_E8M0", "PowerOfTwo"]


@attrs.frozen(kw_only=True)
class PowerOfTwo(NumberFormat):
    """Unsigned powers of two.

    Rounding is upwards, so that no element saturates; 0 becomes the smallest normal number.
    """

    name: str
    bits: int = 8
    storage_dtype: torch.dtype = torch.uint8

    def spec_error(self, spec: QTensorConfig) -> str | None:
        if not spec.is_scale_quant:
            return f"{self.name} holds scales only: use it as scale_format='e8m0', or as the second level of a ScaleQuantSpec"
        return None

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 1.0

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        amax = torch.maximum(-low, high).float()
        return QParams(torch.where(amax == 0, 1.0, amax))

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.copy_(shared_exponent_scale(t.clamp_(0.0, 2.0**127), "ceil", 0, 0))

    def encode(self, t: Tensor) -> Tensor:
        return encode_e8m0(t)

    def decode(self, codes: Tensor) -> Tensor:
        return decode_e8m0(codes)


FP8_E8M0 = PowerOfTwo(name="fp8_e8m0")
