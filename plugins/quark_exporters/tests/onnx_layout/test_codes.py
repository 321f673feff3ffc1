"""The ONNX type of the codes of each number format follows from the format itself."""

import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from quark.config.enums import RoundType
from quark.config.tensor import QTensorConfig
from quark.numbers import NumberFormat, number_format
from quark_exporters.onnx_layout.codes import native_type, stored_codes, stored_type

INT4, UINT4, INT8, UINT8 = (ir.DataType[name] for name in ("INT4", "UINT4", "INT8", "UINT8"))
INT16, UINT16, INT32 = (ir.DataType[name] for name in ("INT16", "UINT16", "INT32"))
E4M3, E5M2 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2


@pytest.mark.parametrize(
    ("name", "rounds_to", "stored_as"),
    [
        ("int4", INT4, INT4),
        ("uint4", UINT4, UINT4),
        ("int8", INT8, INT8),
        ("uint8", UINT8, UINT8),
        ("int16", INT16, INT16),
        ("uint16", UINT16, UINT16),
        ("int32", None, INT32),  # QuantizeLinear has no such type
        ("fp8_e4m3", E4M3, E4M3),
        ("fp8_e5m2", E5M2, E5M2),
        ("bfp16", INT8, INT8),
        ("int3", None, INT4),  # QuantizeLinear would saturate at 7, and not at 3
        ("mx", None, INT8),  # likewise at -128, and not at -127
        ("fp4", None, UINT4),
        ("fp6_e2m3", None, INT8),
        ("fp6_e3m2", None, UINT8),
        ("fp8_e5m3", None, UINT8),  # whole multiples of its smallest value would need 32 bits
        ("mx6", None, INT8),
        ("mx9", None, INT16),
    ],
)
def test_types_of_formats(name: str, rounds_to: ir.DataType | None, stored_as: ir.DataType) -> None:
    codes = stored_codes(number_format(name))
    assert codes is not None
    assert (native_type(number_format(name)), codes.type) == (rounds_to, stored_as)


@pytest.mark.parametrize("name", ["int3", "mx", "fp4", "fp6_e2m3", "fp6_e3m2", "mx6", "mx9", "fp8_e5m2"])
def test_stored_numbers_stand_for_the_values_of_codes(name: str) -> None:
    of = number_format(name)
    codes = of.codes(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 3)
    held = stored_codes(of)
    assert held is not None
    stored = held.stored(codes)
    values = stored.float() * held.step if held.table is None else held.table[stored.int()]
    assert torch.equal(values, of.decode(codes))


class Multiples(NumberFormat):
    """Codes of 16 bits for the multiples of a whole number."""

    name, bits, storage_dtype = "multiples", 16, torch.int16

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 32767.0 * self.factor

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.div_(self.factor).round_().clamp_(-32767, 32767).mul_(self.factor)

    def encode(self, t: Tensor) -> Tensor:
        return (t / self.factor).to(torch.int16)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float() * self.factor


def test_codes_are_not_stored_as_values_that_need_more_than_16_bits() -> None:
    assert stored_codes(Multiples(1)) is not None
    assert stored_codes(Multiples(3)) is None


@pytest.mark.parametrize("rounding", [RoundType.floor, RoundType.round])
def test_quantize_linear_is_not_taken_for_another_rounding(rounding: RoundType) -> None:
    from attrs import evolve

    assert native_type(evolve(number_format("int8"), rounding=rounding)) is None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "opset", "kind"),
    [
        ([0.5, 448.0], 21, "FLOAT8E4M3FN"),
        ([2.0**-100, 2.0**100], 21, "BFLOAT16"),
        ([2.0**-100, 2.0**100], 24, "FLOAT8E8M0"),
        ([1.0009765625, 2.0], 21, "FLOAT16"),
        ([0.1, 0.2], 21, "FLOAT"),
    ],
)
def test_scales_are_stored_in_the_narrowest_type_that_has_them(values: list[float], opset: int, kind: str) -> None:
    found, dtype = stored_type(torch.tensor(values), opset)
    assert found.name == kind
    assert torch.equal(torch.tensor(values).to(dtype).float(), torch.tensor(values))
