"""An algorithm of a broken distribution, whose settings say what is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import quark_tiny_model as tiny
from quark.config.algorithm import AlgoConfig
from quark.plugins import AlgorithmRecord, Source, algorithms
from quark.runs import ModelQuantizer
from quark.torch import LLMTemplate

IDS = [torch.arange(3, 19)[None], torch.arange(30, 40)[None]]
Quantized = Callable[..., nn.Module]


@attrs.define(kw_only=True)
class BreakingConfig(AlgoConfig):
    name: str = "breaking"
    mutant: Any = None
    runs: bool = False

    def runs_with_model(self) -> bool:
        return self.runs


def make(settings: BreakingConfig) -> Any:
    return settings.mutant()


@pytest.fixture
def quantized(request: pytest.FixtureRequest) -> Iterator[Quantized]:
    """Quantizes the tiny model, or another, with the algorithm 'breaking' of broken-quant 0.3.

    The first argument makes the algorithm. Its kind is ``KIND`` of the test's module.
    """
    home = request.module.__name__
    request.module.BreakingConfig, request.module.make = BreakingConfig, make  # a conftest cannot be imported by its name
    record = AlgorithmRecord(name="breaking", kind=request.module.KIND, config=f"{home}:BreakingConfig", processor=f"{home}:make")
    algorithms().register(record, Source("broken-quant", "0.3"))

    def run(mutant: Callable[[], Any], model: nn.Module | None = None, **settings: Any) -> nn.Module:
        config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
        config.algo_config = [BreakingConfig(mutant=mutant, **settings)]
        return ModelQuantizer(config).quantize_model(tiny.tiny_model() if model is None else model, IDS)

    yield run
    algorithms().unregister("breaking")
