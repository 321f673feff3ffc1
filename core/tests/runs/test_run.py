"""A run got ready: what cannot be done is said before any work; what turned out to do nothing is said afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
from torch import nn

from quark.algorithms import BlockContext, Metrics, Rounding, Statistic
from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.planning.family import architecture_of
from quark.plugins import AlgorithmRecord, algorithms
from quark.runs import run as job
from quark.testing import tiny
from quark.torch import LLMTemplate, ModelQuantizer


@attrs.define(kw_only=True)
class CautiousConfig(AlgoConfig):
    name: str = "cautious"
    stage: str = "scaling"
    leaves: int = 3


class Cautious:
    """Changes nothing in the last few blocks, and says so."""

    works_by_block = True
    needs: ClassVar[Sequence[type[Statistic]]] = ()

    def __init__(self, settings: CautiousConfig) -> None:
        self.stage = settings.stage
        self._leaves = settings.leaves
        self._seen = 0

    def apply_global(self, model: nn.Module, architecture: Architecture) -> None:
        self.blocks = len(model.model.layers)  # type: ignore[union-attr, arg-type]

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        self._seen += 1
        return {block.name: {"applied": self._seen <= self.blocks - self._leaves}}

    def rounding(self) -> Rounding | None:
        return None


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


def test_a_transform_of_an_unknown_stage_is_refused_and_never_left_out_in_silence() -> None:
    with pytest.raises(
        ConfigError, match=r"the transform 'cautious' of .* would never run: its stage is 'scale', and there are 'rotation'"
    ):
        ModelQuantizer(config(stage="scale")).quantize_model(tiny.tiny_model())


@pytest.mark.parametrize(("leaves", "is_named"), [(3, False), (2, True), (0, True)])
def test_a_transform_that_leaves_every_block_as_it_was_is_not_named_in_the_result(
    leaves: int, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelQuantizer(config(leaves=leaves)).quantize_model(tiny.tiny_model())
    assert bool(model.quant_config.algo_config) == bool(model.quark_plan.config.algo_config) == is_named  # type: ignore[union-attr]
    assert any("'cautious' has left every block as it was" in r.message for r in caplog.records) != is_named


def test_a_family_without_decoder_blocks_is_told_of_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = architecture_of(tiny.tiny_model())
    assert facts is not None
    monkeypatch.setattr(job, "architecture_of", lambda _: attrs.evolve(facts, decoder_blocks=None))
    plan = ModelQuantizer(config()).plan(tiny.tiny_model())
    assert "no decoder blocks are known of 'llama': the whole model is changed as one block" in plan.notes
    assert not any(
        "no decoder blocks" in note for note in ModelQuantizer(attrs.evolve(config(), algo_config=None)).plan(tiny.tiny_model()).notes
    )
