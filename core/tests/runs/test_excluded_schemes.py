"""`refuse_excluded_schemes` refuses a scheme that the rounding's record excludes, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import quark_tiny_model as tiny
from quark.algorithms import RoundToNearest
from quark.base.lazy import ObjectRef
from quark.config.algorithm import AlgoConfig
from quark.errors import UnsupportedError
from quark.plugins import AlgorithmRecord, algorithms
from quark.runs.run import plan_run
from quark.torch import LLMTemplate

REASON = "its scales are in groups"


@attrs.define(kw_only=True)
class Settings(AlgoConfig):
    name: str = "choosy"


class Choosy(RoundToNearest):
    def __init__(self, settings: Settings) -> None:
        pass


@pytest.fixture(autouse=True)
def choosy() -> Iterator[None]:
    record = AlgorithmRecord(
        name="choosy",
        kind="rounding",
        config=ObjectRef(Settings),
        processor=ObjectRef(Choosy),
        excluded_schemes={"int4_wo_32": REASON, "a_scheme_that_is_not_installed": "it is not here"},
    )
    algorithms().register(record)
    yield
    algorithms().unregister("choosy")


def planned(scheme: str, **choices: Any) -> Any:
    config = LLMTemplate.get("llama").get_config(scheme=scheme, **choices)
    config.algo_config = [Settings()]
    return plan_run(tiny.tiny_model(), config).plan


@pytest.mark.parametrize("choices", [{}, {"layer_config": {"*down_proj": "int8"}}])
def test_an_excluded_scheme_is_refused_with_the_reason(choices: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=rf"'choosy' cannot round 'model\.layers\.0\..*scheme 'int4_wo_32': {REASON}"):
        planned("int4_wo_32", **choices)


def test_so_it_is_with_another_group_size() -> None:
    with pytest.raises(UnsupportedError, match=REASON):
        planned("int4_wo_128")


def test_one_layer_in_it_is_enough() -> None:
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.mlp\.down_proj'"):
        planned("int8", layer_config={"*down_proj": "int4_wo_32"})


@pytest.mark.parametrize("scheme", ["int4_wo_per_channel", "uint4_wo_32", "mxfp4"])
def test_other_schemes_are_planned(scheme: str) -> None:
    assert {row.algorithm for row in planned(scheme).quantized} == {"choosy"}
