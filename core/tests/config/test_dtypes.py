"""A documented number format knows its bits and its dtype in a checkpoint, by the plugins that are
installed."""

import copy
import pickle
from typing import Any

import pytest
import torch

from quark.config.enums import Dtype, QSchemeType
from quark.config.layer import Slot
from quark.errors import UnknownNameError


@pytest.mark.parametrize(
    ("name", "bits", "packed"),
    [
        ("int8", 8, torch.int8),
        ("uint8", 8, torch.uint8),
        ("int4", 4, torch.int32),
        ("uint4", 4, torch.int32),
        ("int16", 16, torch.int16),
        ("uint16", 16, torch.int16),  # the bits of unsigned codes, as in AMD Quark
        ("int32", 32, torch.int32),
        ("int2", 2, torch.uint8),
        ("fp8_e4m3", 8, torch.float8_e4m3fn),
        ("fp6_e2m3", 6, torch.uint8),
        ("fp4", 4, torch.uint8),
        ("mx6", 6, torch.uint8),
        ("mx9", 9, torch.uint8),
        ("bfloat16", 16, torch.bfloat16),
    ],
)
def test_bits_and_dtype_in_a_checkpoint(name: str, bits: int, packed: torch.dtype) -> None:
    assert Dtype(name).to_bitwidth() == bits
    assert Dtype(name).to_torch_packed_dtype() == packed


@pytest.mark.parametrize("dtype", Dtype, ids=lambda dtype: dtype.name)
def test_every_member_is_a_format_with_bits_and_a_dtype(dtype: Dtype) -> None:
    assert dtype.to_bitwidth() > 1
    assert isinstance(dtype.to_torch_packed_dtype(), torch.dtype)


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_torch_dtypes_are_known(name: str) -> None:
    assert Dtype.from_torch_dtype(Dtype(name).to_torch_packed_dtype()) is Dtype(name)


def test_a_torch_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.complex64 is not a number format"):
        Dtype.from_torch_dtype(torch.complex64)


def test_a_format_that_nobody_brings_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match="acme_none"):
        Dtype("acme_none").to_bitwidth()


def test_a_plugins_format_is_a_value_that_leaves_nothing_behind() -> None:
    first, second = Dtype("acme_nf3"), Dtype.from_str("ACME_NF3")
    assert first == second
    assert hash(first) == hash(second)
    assert {first: 1}[second] == 1
    assert first != Dtype("acme_nf4")
    assert first not in {Dtype.int4, Dtype.fp4}
    assert (first.name, first.value, isinstance(first, Dtype)) == ("acme_nf3", "acme_nf3", True)
    assert "acme_nf3" not in Dtype._value2member_map_
    assert first not in list(Dtype)


@pytest.mark.parametrize("name", ["int4", "acme_nf3"])
def test_formats_survive_copies_and_pickles(name: str) -> None:
    dtype = Dtype(name)
    assert copy.deepcopy(dtype) == dtype == pickle.loads(pickle.dumps(dtype))
    assert repr(dtype) == f"<Dtype.{name}: '{name}'>"


@pytest.mark.parametrize("value", [Dtype.int4, Dtype("acme_nf3"), QSchemeType.per_group, Slot.input_tensors], ids=str)
def test_values_are_sent_by_value_whatever_python_does(value: Any) -> None:
    """Python up to 3.11.3 pickles members of enums as an attribute of the class, and sends `getattr`."""
    kind, arguments = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    assert (kind, arguments) == (type(value), (value.value,))
    ours = [base for base in type(value).__mro__ if base.__module__.startswith("quark.")]
    assert any("__reduce_ex__" in vars(base) for base in ours), "what Python inherits to it depends on the version"
    assert b"getattr" not in pickle.dumps(value)


def test_documented_formats_are_single_objects() -> None:
    assert Dtype("int4") is Dtype.int4 is Dtype.from_str("INT4") is pickle.loads(pickle.dumps(Dtype.int4))
    assert Dtype.int4 != "int4"
