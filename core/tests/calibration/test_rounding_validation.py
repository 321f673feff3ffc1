"""Codes are validated on tokens that no statistic has seen.

A layer whose codes do harm is rounded to nearest, and the report says so.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quark
from quark.algorithms import CrossMoment, HeldOut, Hessian, Metrics, Rounding, RoundingTask, RoundToNearest, is_worse, weight_quantizer
from quark.algorithms.rounding import find_nearest_scales
from quark.calibration.batches import calls
from quark.calibration.held_out import FEWEST_TOKENS, MOST_TOKENS, ONE_IN, TOKENS_PER_CHANNEL, held_out_tokens
from quark.calibration.input_statistics import Collector
from quark.calibration.report import CalibrationReport
from quark.calibration.rounding_validation import REASON, _compared_rows
from quark.calibration.sample_grid import SampleGrid
from quark.config.model import QConfig
from quark.errors import NonFiniteError, RoundingError
from quark.models.layers import quantized_class
from quark.models.plan.quant_plan import make_plan
from quark.runs.quantize_block import quantize_blocks
from quark.runs.sink import InPlaceSink

from ..hand_made_runs import hand_made_run

TOKENS = torch.randn(320, 32, generator=torch.Generator().manual_seed(0))


class Harmful(RoundToNearest):
    """Rounds to nearest, but gives layers of some names twice the nearest value."""

    needs = (Hessian,)

    def __init__(self, *names: str) -> None:
        self.names = names

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        for name in set(self.names).intersection(task.layers):
            layer = task.layers[name]
            layer.weight = nn.Parameter(layer.weight.data * 2)
        super().round(task)
        return {name: {"said": 1} for name in task.layers}


class Hopeless(RoundToNearest):
    needs = (Hessian,)

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        raise RoundingError("nothing can be made of these inputs")


class Forgetful(RoundToNearest):
    """Overfits: has no error on the tokens of its statistics, and a large error on all others."""

    needs = (Hessian,)

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        seen = task.statistic(Hessian).matrix()
        basis = torch.linalg.eigh(seen).eigenvectors[:, :-8]  # directions that were not there
        weights = [layer.weight.data for layer in task.layers.values()]
        super().round(task)
        for layer, weight in zip(task.layers.values(), weights, strict=True):
            layer.weight = nn.Parameter(weight @ (torch.eye(len(basis)) + basis @ basis.t()))
        return {}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval()


def quantized(rounding: Rounding, data: Any, scheme: str = "int4_wo_32", *, two_passes: bool = False) -> tuple[Any, CalibrationReport]:
    made = copy.deepcopy(model())
    plan = make_plan(made, QConfig(global_quant_config=quark.schemes().load_config(scheme)()), None)
    return made, quantize_blocks(hand_made_run(made, plan, calls(data), rounding, two_passes=two_passes), InPlaceSink(made))


@pytest.mark.parametrize("two_passes", [False, True])
def test_a_layer_whose_codes_do_harm_is_rounded_to_nearest_alone(two_passes: bool) -> None:
    found, report = quantized(Harmful("2"), [TOKENS], two_passes=two_passes)
    plain, _ = quantized(RoundToNearest(), [TOKENS])
    for name in ("0", "2", "4"):
        layer, expected = found.get_submodule(name), plain.get_submodule(name)
        assert torch.equal(layer.weight, expected.weight), name
        assert torch.equal(layer.weight_quantizer.scale, expected.weight_quantizer.scale), name
    assert [name for name, f in report.layers.items() if REASON in f] == ["2"]
    assert report.layers["2"]["held_out_error"] > 1
    for name in ("0", "4"):  # rounded to nearest by the rounding itself
        metrics = report.layers[name]
        assert metrics.pop("output_snr_db") == metrics.pop("nearest_snr_db") > 0
    assert report.layers["0"] | report.layers["4"] == {"tokens": 320, "said": 1, "held_out_error": 1.0}
    lines = [line for line in report.lines() if "nearest" in line]
    assert len(lines) == 1
    assert lines[0].startswith("1 of 3 layers")
    assert "'2'" in lines[0]


def test_what_fits_the_tokens_it_was_shown_and_no_others_is_found_out() -> None:
    few_directions = TOKENS[:, :8] @ torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    fresh = few_directions.clone()
    fresh[:20] = TOKENS[:20]  # held-out tokens lie elsewhere
    assert REASON not in quantized(Forgetful(), [few_directions])[1].layers["0"]
    assert REASON in quantized(Forgetful(), [fresh])[1].layers["0"]


def test_where_no_codes_can_be_found_the_run_goes_on() -> None:
    found, report = quantized(Hopeless(), [TOKENS[:10]])
    plain, _ = quantized(RoundToNearest(), [TOKENS])
    assert torch.equal(found.get_submodule("0").weight, plain.get_submodule("0").weight)
    assert {f[REASON] for f in report.layers.values()} == {"nothing can be made of these inputs"}
    assert [line for line in report.lines() if "nearest" in line] == [
        "3 of 3 layers are rounded to nearest; the first is '0': nothing can be made of these inputs."
    ]


def test_activations_that_overflow_end_the_run() -> None:
    bad = TOKENS.clone()
    bad[3, 5] = torch.inf
    with pytest.raises(NonFiniteError, match=r"the input of '?0'? contains NaN or Inf, because activations overflow.*another dtype"):
        quantized(Harmful(), [bad])


def test_layers_that_share_a_scale_are_given_up_together() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.q_proj(x) + self.k_proj(x) + self.v_proj(x)
            return found

    torch.manual_seed(0)
    made: Any = nn.Sequential(Attention())
    config = QConfig(global_quant_config=quark.schemes().load_config("nvfp4")(), shared_scale_groups=[["q_proj", "k_proj"]])
    plan = make_plan(made, config, None)
    report = quantize_blocks(hand_made_run(made, plan, calls([TOKENS]), Harmful("0.k_proj")), InPlaceSink(made))
    outer = [made[0].get_submodule(f"{n}_proj").weight_quantizer.qparams.outer_scale for n in "qkv"]
    assert torch.equal(outer[0], outer[1])
    assert not torch.equal(outer[0], outer[2])
    assert [n for n in "qkv" if REASON in report.layers[f"0.{n}_proj"]] == ["q", "k"]


@pytest.mark.parametrize("batches", [1, 3, 320])
def test_held_out_tokens_are_in_no_statistic(batches: int) -> None:
    few = torch.randint(-3, 4, (320, 161), generator=torch.Generator().manual_seed(3)).float()  # sums of products are exact
    collector = Collector((Hessian, CrossMoment), 161, few.device, len(few), SampleGrid(batches))
    for call, part in enumerate(few.chunk(batches)):
        collector.update(part, part + 1, call, collector.tokens)
    collector.complete()
    held = torch.arange(320) < 320 // ONE_IN
    found = collector.held_out
    assert found is not None
    assert torch.equal(found.x, few[held])
    assert found.reference is not None
    assert torch.equal(found.reference, few[held] + 1)
    hessian = collector.statistics[Hessian]
    assert isinstance(hessian, Hessian)
    assert (hessian.tokens, collector.tokens) == (300, 320)
    assert torch.equal(hessian.matrix(), few[~held].t() @ few[~held])


def test_where_tokens_are_many_for_the_channels_none_is_lost_to_the_statistics() -> None:
    many = torch.randint(-3, 4, (320, 320 // TOKENS_PER_CHANNEL), generator=torch.Generator().manual_seed(3)).float()
    collector = Collector((Hessian,), many.shape[1], many.device, len(many), SampleGrid(3))
    for call, part in enumerate(many.chunk(3)):
        collector.update(part, None, call, collector.tokens)
    collector.complete()
    found = collector.held_out
    assert found is not None
    assert torch.equal(found.x, many[: 320 // ONE_IN])
    hessian = collector.statistics[Hessian]
    assert isinstance(hessian, Hessian)
    assert (hessian.tokens, collector.tokens) == (320, 320)
    assert torch.equal(hessian.matrix(), many.t() @ many)


def test_few_tokens_are_left_to_the_statistics_and_of_many_enough_are_held_out() -> None:
    assert held_out_tokens(ONE_IN * FEWEST_TOKENS - 1) == 0
    assert held_out_tokens(ONE_IN * FEWEST_TOKENS) == FEWEST_TOKENS
    assert held_out_tokens(1000) == 1000 // ONE_IN
    assert held_out_tokens(300_000) == MOST_TOKENS
    collector = Collector((Hessian,), 32, TOKENS.device, 60, SampleGrid(1))
    collector.update(TOKENS[:60], None, 0, 0)
    collector.complete()
    assert collector.held_out is None
    assert collector.statistics[Hessian].tokens == 60


def test_the_output_error_is_against_the_float_model_where_that_is_known() -> None:
    weight, rounded = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    x, reference = TOKENS[:7], TOKENS[7:14]
    for held_out, inputs in ((HeldOut(x), x), (HeldOut(x, reference), reference)):
        outputs = held_out.outputs(weight)
        torch.testing.assert_close(outputs, inputs @ weight.t())
        expected = (inputs @ weight.t() - x @ rounded.t()).square().sum(1)
        torch.testing.assert_close(held_out.squared_error(rounded, outputs), expected)


@pytest.mark.parametrize("scheme", ["int4_wo_32", "int8", "nvfp4", "mxfp4"])
def test_rows_that_are_compared_have_the_values_of_round_to_nearest(scheme: str) -> None:
    """The comparison rounds only some rows of wide layers, with scales of the whole weight."""
    torch.manual_seed(0)
    config = quark.schemes().load_config(scheme)()
    for outputs, inputs in ((160, 32), (32, 160), (64, 64)):
        linear = nn.Linear(inputs, outputs, bias=False)
        layer = quantized_class(linear).from_float(linear, config)
        task, quantizer = RoundingTask({"layer": layer}), weight_quantizer(layer)
        rows = _compared_rows(quantizer.quantizer.granularity, layer.weight)
        assert (rows is None) == (outputs <= inputs)
        find_nearest_scales(task)
        assert torch.equal(layer.weight, linear.weight)
        compared = quantizer.rows_of(layer.weight.detach(), rows)
        assert len(compared) >= (outputs if rows is None else inputs // 3)
        RoundToNearest().round(task)
        assert torch.equal(compared, layer.weight.detach()[rows or slice(None)])


def test_worse_is_beyond_the_noise_of_the_tokens() -> None:
    nearest = torch.rand(64, generator=torch.Generator().manual_seed(3))
    assert not is_worse(nearest, nearest)
    assert not is_worse(nearest * 0.5, nearest)
    assert is_worse(nearest * 1.1, nearest)
    once = nearest.clone()
    once[3] += 1
    assert not is_worse(once, nearest), "one token of 64"
    assert is_worse(torch.full_like(nearest, torch.nan), nearest)
