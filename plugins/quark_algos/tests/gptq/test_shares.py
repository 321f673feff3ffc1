"""The strength of a correction: the one that serves tokens best which no statistic has seen."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark
from quark.algorithms import HeldOut, Hessian, OutputMoment, RoundingTask, Statistic
from quark.models.layers import quantized_class
from quark_algos.gptq.config import GPTAQConfig
from quark_algos.gptq.correction import ErrorMoment, share_for
from quark_algos.gptq.gptq import ColumnRounding

from ..runs import QRONOS

ROWS, COLUMNS, TOKENS = 8, 64, 600


def tokens(count: int, seed: int, error: float) -> tuple[Tensor, Tensor]:
    """Inputs in the quantized model and in the float one.

    Their difference is in part what the inputs show, as a constant bias is.
    """
    g = torch.Generator().manual_seed(seed)
    reference = torch.randn(count, COLUMNS, generator=g) @ torch.randn(COLUMNS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return reference * (1 - error) + 0.2 * torch.randn(count, COLUMNS, generator=g), reference


def rounded(settings: Any, held_out: tuple[Tensor, Tensor] | None, *, by_outputs: bool = False) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Round a layer; returns its float weight, its rounded one and its metrics.

    ``by_outputs`` is whether it is known by its output in the float model.
    """
    config = quark.schemes().load_config("int4_wo_32")()
    torch.manual_seed(1)
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    layer = quantized_class(linear).from_float(linear, config)
    x, reference = tokens(TOKENS, 2, 0.3)
    weight = linear.weight.detach().clone()
    kept = None if held_out is None else HeldOut(*held_out)
    moments: dict[type[Statistic], Statistic] = {Hessian: Hessian(COLUMNS, x.device), ErrorMoment: ErrorMoment(COLUMNS, x.device)}
    if by_outputs:
        del moments[ErrorMoment]
        moments[OutputMoment], reference = OutputMoment(COLUMNS, x.device, ROWS), reference @ weight.t()
        kept = None if held_out is None else HeldOut(held_out[0], float_outputs=held_out[1] @ weight.t())
    for moment in moments.values():
        moment.update(x, reference)
    metrics = ColumnRounding(settings).round(RoundingTask({"layer": layer}, moments, held_out=kept))
    return weight, layer.weight.detach(), dict(metrics["layer"])


@pytest.mark.parametrize(("error", "least", "most"), [(0.3, 0.9, 1.0), (0.1, 0.1, 0.6), (-0.3, 0.0, 0.0)])
def test_a_correction_is_as_strong_as_held_out_tokens_want_it(error: float, least: float, most: float) -> None:
    """Statistics show inputs that are 0.7 of the float model's.

    Held-out ones are 0.7, 0.9 and 1.3 of them.
    """
    x, reference = tokens(200, 3, error)
    weight, best, metrics = rounded(attrs.evolve(QRONOS, correction_share=1.0), (x, reference))
    assert least <= metrics["correction_share"] <= most
    _, full, other = rounded(attrs.evolve(QRONOS, correction_share=1.0, preset="reference"), (x, reference))
    assert other["correction_share"] == 1.0
    held_out = HeldOut(x, reference)
    errors = [float(held_out.squared_error(rounded_, held_out.outputs(weight)).sum()) for rounded_ in (best, full)]
    assert errors[0] < errors[1] or least > 0.8


@pytest.mark.parametrize("settings", [QRONOS, attrs.evolve(QRONOS, preset="reference"), GPTAQConfig()], ids=["best", "reference", "gptaq"])
@pytest.mark.parametrize("is_held_out", [True, False])
def test_a_layer_that_is_known_by_its_float_output_is_corrected_as_one_that_is_known_by_its_float_input(
    settings: Any, is_held_out: bool
) -> None:
    held_out = tokens(200, 3, 0.2) if is_held_out else None
    (_, by_inputs, metrics), (weight, by_outputs, others) = (rounded(settings, held_out, by_outputs=b) for b in (False, True))
    assert metrics["correction_share"] == pytest.approx(others["correction_share"], rel=1e-4) != 0
    error, whole = (by_inputs - by_outputs).square().sum(), (by_inputs - weight).square().sum()
    assert error < 1e-2 * whole, "a few ties go the other way"


def test_the_strength_minimizes_the_error_of_the_float_models_outputs() -> None:
    """By hand: W (x − x̃) = 3 + 1 is missing, and a full step gives 1 + 2 of it."""
    wt, step = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0], [1.0]])
    x, reference = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 1.0]])
    for held_out in (HeldOut(x, reference), HeldOut(x, float_outputs=reference @ wt)):
        assert share_for(wt, step, held_out, 9.0) == pytest.approx(4 / 3)
        assert share_for(wt, step, held_out, 1.0) == 1.0
        assert share_for(wt, -step, held_out, 1.0) == 0.0
        assert share_for(wt, 0 * step, held_out, 0.7) == 0.7, "a step that changes nothing may be as strong as it likes"


def test_without_held_out_tokens_a_correction_from_few_tokens_is_left_out() -> None:
    for settings, share in ((attrs.evolve(QRONOS, correction_share=1.0), 1.0), (GPTAQConfig(alpha=0.5), 0.5)):
        assert rounded(settings, None)[2]["correction_share"] == share
