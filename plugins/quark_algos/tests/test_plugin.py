"""The records of the algorithms: their names, and what they point at."""

from __future__ import annotations

from typing import Any

import pytest

import quark
from quark.config.algorithm import AlgoConfig
from quark_algos.plugin import quark_register_algorithms

NAMES = ["autosmoothquant", "awq", "gptaq", "gptq", "qronos", "rotation", "smoothquant"]


def test_the_seven_documented_algorithms_are_registered() -> None:
    assert set(NAMES) <= set(quark.algorithms().names())
    assert quark.algorithms().get("smooth").name == "smoothquant"
    assert quark.algorithms().get("quarot").name == "rotation"


@pytest.mark.parametrize("record", list(quark_register_algorithms()), ids=lambda r: r.name)
def test_what_is_registered_can_be_loaded(record: Any) -> None:
    assert record.processor.load()
    assert issubclass(record.config.load(), AlgoConfig)
    assert all(reference.load() for reference in record.exports.values())
