"""Preparing a run raises an error for impossible requests before any work.

After the run, a warning names settings that had no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pytest
from torch import nn

import quark_tiny_model as tiny
from quark.algorithms import BlockContext, Metrics, Transform, TransformRun
from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins import AlgorithmRecord, algorithms
from quark.runs import run as job
from quark.torch import LLMTemplate, ModelQuantizer


@attrs.define(kw_only=True)
class CautiousConfig(AlgoConfig):
    name: str = "cautious"
    leaves: int = 3


class Cautious(Transform):
    """Changes nothing in the last few blocks, and reports this."""

    def __init__(self, settings: CautiousConfig) -> None:
        self._leaves = settings.leaves

    def start(self, model: nn.Module, plan: QuantPlan) -> CautiousRun:
        return CautiousRun(len(model.model.layers) - self._leaves)  # type: ignore[union-attr, arg-type]


class CautiousRun(TransformRun):
    def __init__(self, changed: int) -> None:
        self._left = changed

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        self._left -= 1
        return {block.name: {"applied": self._left >= 0}}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    here = __name__
    algorithms().register(AlgorithmRecord(name="cautious", kind="transform", config=f"{here}:CautiousConfig", processor=f"{here}:Cautious"))
    yield
    algorithms().unregister("cautious")


def config(**settings: Any) -> QConfig:
    made = LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
    made.algo_config = [CautiousConfig(**settings)]
    return made


@pytest.mark.parametrize(("leaves", "is_named"), [(3, False), (2, True), (0, True)])
def test_a_transform_that_leaves_every_block_as_it_was_is_not_named_in_the_result(
    leaves: int, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelQuantizer(config(leaves=leaves)).quantize_model(tiny.tiny_model())
    assert bool(model.quant_config.algo_config) == bool(model.quark_plan.config.algo_config) == is_named  # type: ignore[union-attr]
    assert any("'cautious' has changed no block" in r.message for r in caplog.records) != is_named


def test_a_family_without_decoder_blocks_is_told_of_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = architecture_of(tiny.tiny_model())
    assert facts is not None
    monkeypatch.setattr(job, "architecture_of", lambda _: attrs.evolve(facts, decoder_blocks=None))
    plan = ModelQuantizer(config()).plan(tiny.tiny_model())
    assert "the blocks of 'llama' are not known, so the whole model is changed as one block" in plan.notes
    assert not any(
        "no decoder blocks" in note for note in ModelQuantizer(attrs.evolve(config(), algo_config=None)).plan(tiny.tiny_model()).notes
    )
