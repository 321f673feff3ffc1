"""`refuse_vectors` refuses algorithms that choose single elements of formats that round several together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest

import quark_tiny_model as tiny
from quark.algorithms import Metrics, RoundedBlock, RoundToNearest, Tuning
from quark.base.lazy import ObjectRef
from quark.config.algorithm import AlgoConfig
from quark.errors import UnsupportedError
from quark.numbers import number_format
from quark.plugins import AlgorithmRecord, FormatRecord, algorithms, formats
from quark.runs.run import plan_run
from quark.torch import LLMTemplate


@attrs.define(kw_only=True)
class OneByOne(AlgoConfig):
    name: str = "one_by_one"


@attrs.define(kw_only=True)
class Together(AlgoConfig):
    name: str = "together"


@attrs.define(kw_only=True)
class Tuned(AlgoConfig):
    name: str = "tuned"


class Single(RoundToNearest):
    rounds_vectors = False

    def __init__(self, settings: AlgoConfig) -> None:
        pass


class Vectors(Single):
    rounds_vectors = True


class Tunes(Tuning):
    def __init__(self, settings: AlgoConfig) -> None:
        pass

    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        return {}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    sound: Any = number_format("int4")

    class Pairs(type(sound)):  # type: ignore[misc]
        vector = 2

    pairs = Pairs(name="pairs", bits=4, signed=True, storage_dtype=sound.storage_dtype, packing=sound.packing)
    formats().register(FormatRecord(name="pairs", bits=4, format=ObjectRef(pairs)))
    kinds = {OneByOne: ("rounding", Single), Together: ("rounding", Vectors), Tuned: ("block_tuning", Tunes)}
    for settings, (kind, processor) in kinds.items():
        record = AlgorithmRecord(name=settings().name, kind=kind, config=ObjectRef(settings), processor=ObjectRef(processor))
        algorithms().register(record)
    yield
    for settings in kinds:
        algorithms().unregister(settings().name)
    formats().unregister("pairs")


def planned(dtype: str, of: Sequence[AlgoConfig]) -> Any:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    weight = attrs.evolve(config.global_quant_config.weight, dtype=dtype)
    config.global_quant_config = attrs.evolve(config.global_quant_config, weight=weight)
    config.algo_config = list(of)
    return plan_run(tiny.tiny_model(), config).plan


@pytest.mark.parametrize(("of", "name"), [([OneByOne()], "one_by_one"), ([Tuned()], "tuned"), ([Together(), Tuned()], "tuned")])
def test_the_algorithm_the_layer_and_the_format_are_named(of: list[AlgoConfig], name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"'{name}' chooses .*'pairs', the format of 'model\.layers\.0\..*', encodes 2"):
        planned("pairs", of)


def test_others_are_planned() -> None:
    assert {row.algorithm for row in planned("pairs", [Together()]).quantized} == {"together"}
    assert {row.algorithm for row in planned("pairs", []).quantized} == {None}
    assert {row.algorithm for row in planned("int4", [OneByOne(), Tuned()]).quantized} == {"one_by_one"}
