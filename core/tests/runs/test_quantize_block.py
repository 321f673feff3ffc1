"""The runner rounds biases, gives roundings the layers of the plan, and keeps finished blocks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from quark.algorithms import BlockContext, Hessian, Metrics, Rounding, RoundingTask, RoundToNearest, Transform
from quark.calibration import model_error
from quark.calibration.batches import calls
from quark.calibration.report import CalibrationReport
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers import is_quantized
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark.plugins import BlockFinished, Event, documented_object, listening
from quark.plugins.run_events import RunEvents
from quark.runs.quantize_block import quantize_block, quantize_blocks
from quark.runs.sink import BlockResult, InPlaceSink
from quark_devkit.small_models import run_config, small_model, with_cache

from ..hand_made_runs import hand_made_run

INT8 = documented_object("Int8PerTensorSpec")(is_dynamic=False, symmetric=True).to_quantization_spec()


class Calibrated(RoundToNearest):
    """Rounds to nearest, but needs inputs, so layers are rounded in the middle of the forwards."""

    needs = (Hessian,)


@pytest.mark.parametrize("two_passes", [False, True])
@pytest.mark.parametrize("rounding", [RoundToNearest(), Calibrated()], ids=lambda r: type(r).__name__)
def test_a_bias_is_rounded_to_nearest_by_its_own_spec(rounding: Rounding, two_passes: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    before = [layer.bias.detach().clone() for layer in model]
    plan = make_plan(model, QConfig(global_quant_config=QLayerConfig(weight=INT8, bias=INT8)), None)
    run = hand_made_run(model, plan, calls([torch.randn(24, 16)]), rounding, two_passes=two_passes)
    quantize_blocks(run, InPlaceSink(model))
    for layer, bias in zip(model, before, strict=True):
        scale = layer.bias_quantizer.scale
        assert scale is not None, "the bias has not been rounded"
        codes = layer.bias / scale
        torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
        assert codes.abs().max().round() in (127, 128), "the largest takes the whole range"
        assert (layer.bias - bias).abs().max() <= scale / 2 * (1 + 1e-5)
        assert not torch.equal(layer.bias, bias)


class Sees(Calibrated):
    """Keeps the names of the layers that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        self.names.update(task.layers)
        return super().round(task)


@pytest.mark.parametrize("two_passes", [False, True])
def test_quantize_blocks_gives_the_rounding_those_layers_that_the_plan_gives_it(two_passes: bool) -> None:
    model, sees = small_model(), Sees()
    plan = make_plan(model, QConfig(global_quant_config=QLayerConfig(weight=INT8), exclude=["lm_head"]), architecture_of(model))
    started = hand_made_run(model, plan, calls([torch.arange(16)[None]]), sees, two_passes=two_passes)
    given = {row.name for row in started.plan.rows if row.algorithm}
    left = {name for name in given if name.endswith("q_proj")}
    assert left
    assert left != given
    rows = tuple(attrs.evolve(row, algorithm=None) if row.name in left else row for row in started.plan.rows)
    run = attrs.evolve(started.run, plan=attrs.evolve(started.plan, rows=rows))
    report = quantize_blocks(attrs.evolve(started, run=run), InPlaceSink(model))
    assert sees.names == given - left == set(report.layers)
    assert all(is_quantized(model.get_submodule(name)) for name in given)


def test_what_happens_to_one_block_is_one_function_of_less_than_sixty_lines() -> None:
    assert len(inspect.getsource(quantize_block).splitlines()) < 60


class Counts(Transform):
    """A transform that counts the blocks that it has seen."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.count = 0

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
    started = hand_made_run(model, plan, [], RoundToNearest(), transform)
    started = attrs.evolve(started, run=attrs.evolve(started.run, events=RunEvents("quantize")))
    with listening(heard.append):
        report = quantize_blocks(started, sink)
    assert transform.seen == [7]
    assert sink.results[-1].learned == {"input_groups": [["b", "c"]], "transforms": [8]}
    assert report.unreached == ["a"]
    assert [event.outcome for event in heard if isinstance(event, BlockFinished)] == ["resumed", "done"]
    layers = {name: is_quantized(m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert not any(done for name, done in layers.items() if ".layers.0." in name)
    assert all(done for name, done in layers.items() if ".layers.1." in name)


def test_a_sequential_run_measures_the_error_of_the_model_where_no_scale_is_set_inside_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_error, "ONE_IN", 1)

    def measured(config: QConfig, rounding: Rounding) -> dict[str, Any]:
        model = small_model()
        started = hand_made_run(model, make_plan(model, config, architecture_of(model)), calls([torch.arange(16)[None]]), rounding)
        return quantize_blocks(started, InPlaceSink(model)).model_error

    config = run_config("int4_wo_32")
    assert measured(config, Calibrated())["tokens"] == 16
    assert not measured(config, RoundToNearest())
    assert not measured(with_cache(config), Calibrated())
