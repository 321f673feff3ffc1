"""What the runner does to a layer beside its weight."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from quark.algorithms import BlockContext, Hessian, Rounding, RoundToNearest
from quark.calibration.batches import calls
from quark.calibration.report import CalibrationReport
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.events import RunEvents
from quark.modules import is_quantized
from quark.planning.decoder_blocks import Block
from quark.planning.family import architecture_of
from quark.planning.plan import QuantPlan, make_plan
from quark.plugins import BlockFinished, Event, documented_object, listening
from quark.runs.quantize_block import quantize_block, quantize_blocks, start_transforms
from quark.runs.sink import BlockResult, InPlaceSink
from quark_devkit.small_models import small_model

INT8 = documented_object("Int8PerTensorSpec")(is_dynamic=False, symmetric=True).to_quantization_spec()


class Calibrated(RoundToNearest):
    """Rounds to nearest, but wants to see inputs first, so that layers are finished in the middle of the forwards."""

    needs = (Hessian,)


@pytest.mark.parametrize("two_passes", [False, True])
@pytest.mark.parametrize("rounding", [RoundToNearest(), Calibrated()], ids=lambda r: type(r).__name__)
def test_a_bias_is_rounded_to_nearest_by_its_own_spec(rounding: Rounding, two_passes: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    before = [layer.bias.detach().clone() for layer in model]
    plan = make_plan(model, QConfig(global_quant_config=QLayerConfig(weight=INT8, bias=INT8)), None)
    quantize_blocks(model, plan, calls([torch.randn(24, 16)]), rounding, InPlaceSink(model), two_passes=two_passes)
    for layer, bias in zip(model, before, strict=True):
        scale = layer.bias_quantizer.scale
        assert scale is not None, "the bias has not been rounded"
        codes = layer.bias / scale
        torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
        assert codes.abs().max().round() in (127, 128), "the largest takes the whole range"
        assert (layer.bias - bias).abs().max() <= scale / 2 * (1 + 1e-5)
        assert not torch.equal(layer.bias, bias)


def test_what_happens_to_one_block_is_one_function_of_less_than_sixty_lines() -> None:
    assert len(inspect.getsource(quantize_block).splitlines()) < 60


class Counts:
    """A transform that learns how many blocks it has seen."""

    works_by_block = True
    needs = ()

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.count = 0

    def start(self, model: nn.Module, plan: QuantPlan) -> Counts:
        return self

    def rounding(self) -> None:
        return None

    def apply_global(self, model: nn.Module) -> None:
        pass

    def apply(self, block: BlockContext) -> dict[str, dict[str, Any]]:
        self.seen.append(self.count)
        self.count += 1
        return {}

    def learned(self) -> int:
        return self.count

    def recall(self, learned: int) -> None:
        self.count = learned


class Resumed(InPlaceSink):
    """A sink that has the first block already."""

    def __init__(self, model: nn.Module, first: BlockResult) -> None:
        super().__init__(model)
        self.first = first
        self.results: list[BlockResult] = []

    def finished(self, block: Block) -> BlockResult | None:
        return self.first if block.name.endswith(".0") else None

    def end_block(self, block: Block | None, result: BlockResult) -> None:
        if block is not None:
            self.results.append(result)


def test_a_finished_block_is_neither_transformed_nor_rounded_and_hands_on_what_was_learned_from_it() -> None:
    model = small_model()
    plan = make_plan(model, QConfig(global_quant_config=QLayerConfig(weight=INT8)), architecture_of(model))
    first = BlockResult(CalibrationReport(unreached=["a"]).to_dict(), {"input_groups": [["b", "c"]], "transforms": [7]})
    sink, transform = Resumed(model, first), Counts()
    heard: list[Event] = []
    started = start_transforms(model, plan, [transform])
    with listening(heard.append):
        report = quantize_blocks(model, plan, [], RoundToNearest(), sink, RunEvents("quantize"), transforms=started)
    assert transform.seen == [7]
    assert sink.results[-1].learned == {"input_groups": [["b", "c"]], "transforms": [8]}
    assert report.unreached == ["a"]
    assert [event.outcome for event in heard if isinstance(event, BlockFinished)] == ["resumed", "done"]
    layers = {name: is_quantized(m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert not any(done for name, done in layers.items() if ".layers.0." in name)
    assert all(done for name, done in layers.items() if ".layers.1." in name)
