"""quantizer_for: formats may build quantizers of their own; the core builds one and two levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.numbers import TensorQuantizer, level_quantizer, number_format, quantizer_for
from quark.numbers.progressive import ProgressiveQuantizer
from quark.numbers.single_level import SingleLevelQuantizer
from quark.numbers.two_level import TwoLevelQuantizer
from quark.plugins import FormatRecord, Source, formats

INT4: Any = type(number_format("int4"))


class ThreeLevels(INT4):
    """Builds the quantizer of three levels from the last one, and leaves all others to the core."""

    def quantizer(self, levels: tuple[QTensorConfig, ...], *, activation: bool) -> TensorQuantizer | None:
        return level_quantizer(levels[2], activation=activation) if len(levels) == 3 else None


THREE_LEVELS = ThreeLevels(name="three_levels", bits=4, signed=True, storage_dtype=number_format("int4").storage_dtype)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    formats().register(FormatRecord(name="three_levels", bits=4, format=f"{__name__}:THREE_LEVELS"), Source("of-three", "1.0"))
    yield
    formats().unregister("three_levels")


def level(dtype: str, **more: Any) -> QTensorConfig:
    return QTensorConfig(dtype=dtype, is_dynamic=False, symmetric=True, **{"qscheme": "per_tensor", **more})


CHANNEL: dict[str, Any] = {"qscheme": "per_channel", "ch_axis": 0}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_format_of_any_level_may_build_the_quantizer(place: int) -> None:
    specs = [level("fp8_e4m3"), level("int8"), level("int4", **CHANNEL)]
    with pytest.raises(UnsupportedError, match="no number format builds a quantizer of the 3 levels fp8_e4m3 → int8 → int4"):
        quantizer_for(tuple(specs), activation=False)
    specs[place] = specs[place].set(dtype="three_levels")
    quantizer = quantizer_for(tuple(specs), activation=False)
    assert isinstance(quantizer, SingleLevelQuantizer)
    assert quantizer.spec == specs[2]


def test_a_format_that_builds_none_leaves_the_choice_to_the_core() -> None:
    block = level("three_levels", qscheme="per_group", ch_axis=-1, group_size=16)
    cases: list[tuple[type, Any]] = [
        (SingleLevelQuantizer, level("three_levels")),
        (TwoLevelQuantizer, (block, level("fp8_e4m3", is_scale_quant=True))),
        (ProgressiveQuantizer, (level("fp8_e4m3"), level("three_levels", **CHANNEL))),
    ]
    for cls, spec in cases:
        assert type(quantizer_for(spec, activation=False)) is cls
