"""Values of a format: a format that cannot decode a code is told so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import NumberFormat
from quark_devkit.check import CheckFailedError
from quark_devkit.checks.format.cases import all_values


class Fifteen(NumberFormat):
    """Numbers from -7 to 7, of which four bits could tell one more."""

    name = "fifteen"
    bits = 4
    storage_dtype = torch.uint8

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 7.0

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.round_().clamp_(-7, 7)

    def encode(self, t: Tensor) -> Tensor:
        return (t + 7).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return torch.arange(-7.0, 8.0)[codes.int()]


def test_a_format_that_cannot_decode_a_code_is_told_so() -> None:
    with pytest.raises(CheckFailedError, match="cannot decode all 16 codes of 4 bits, which a damaged file may hold: index 15"):
        all_values(Fifteen())
