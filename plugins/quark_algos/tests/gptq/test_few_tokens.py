"""Rounding by few tokens is no worse for other tokens than rounding to nearest.

Whatever the number of tokens and the spectrum of the inputs.
"""

from __future__ import annotations

from functools import cache

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark
from quark.algorithms import CrossMoment, Hessian, Rounding, RoundingTask, RoundToNearest
from quark.models.layers import quantized_class
from quark_algos.equalization.search import SearchedNearest
from quark_algos.gptq.config import GPTAQConfig, GPTQConfig
from quark_algos.gptq.gptq import ColumnRounding

K, N = 128, 64
TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 127, 128, 129, 160, 256, 512, 2048)
ROUNDINGS = {"gptq": ColumnRounding(GPTQConfig()), "gptaq": ColumnRounding(GPTAQConfig()), "nearest": SearchedNearest()}


@attrs.frozen(eq=False)
class Inputs:
    """Tokens of one distribution, ``x [2048, K]``, and Σ ``[K, K]``, its true Hessian."""

    x: Tensor
    sigma: Tensor


@cache
def inputs(spectrum: str) -> Inputs:
    g = torch.Generator().manual_seed(0)
    values = {
        "white": torch.ones(K),
        "nearly white": torch.linspace(1, 1.5, K),
        "two levels": torch.where(torch.arange(K) < K // 4, 10.0, 1.0),
        "decaying": torch.arange(1, K + 1).float() ** -0.75,
        "power law": torch.arange(1, K + 1).float() ** -1.5,
        "low rank": torch.where(torch.arange(K) < K // 8, 1.0, 1e-4),
    }[spectrum]
    basis = torch.linalg.qr(torch.randn(K, K, generator=g))[0]
    return Inputs(torch.randn(2048, K, generator=g) @ (basis * values.sqrt()).t(), (basis * values) @ basis.t())


@cache
def ratio(name: str, spectrum: str, tokens: int, scheme: str = "int4_wo_32") -> float:
    """The expected error of another token ÷ that of rounding to nearest with scales by range."""
    here = inputs(spectrum)
    rounding: Rounding = ROUNDINGS[name]
    moments = {kind: kind(K, here.x.device) for kind in rounding.needs}
    for hessian in moments.values():
        hessian.update(here.x[:tokens], here.x[:tokens] if isinstance(hessian, CrossMoment) else None)
    errors = []
    for each in (rounding, RoundToNearest()):
        torch.manual_seed(1)
        layer = nn.Linear(K, N, bias=False)
        weight = layer.weight.detach().clone()
        made = quantized_class(layer).from_float(layer, quark.schemes().load_config(scheme)())
        each.round(RoundingTask({"layer": made}, moments))
        error = weight - made.weight.detach()
        errors.append(float((error @ here.sigma).mul(error).sum()))
    return errors[0] / errors[1]


SPECTRA = ("white", "nearly white", "two levels", "decaying", "power law", "low rank")


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("name", ROUNDINGS)
def test_it_is_never_worse_than_round_to_nearest(name: str, spectrum: str) -> None:
    found = {tokens: ratio(name, spectrum, tokens) for tokens in TOKENS}
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_one_token_more_changes_little_wherever_there_are_as_many_as_channels(spectrum: str) -> None:
    found = [ratio("gptq", spectrum, tokens) for tokens in (127, 128, 129)]
    assert max(found) - min(found) < 0.02, found


@pytest.mark.parametrize("spectrum", ["power law", "low rank"])
def test_where_inputs_have_few_directions_few_tokens_are_enough_to_gain_much(spectrum: str) -> None:
    assert ratio("gptq", spectrum, 64) < 0.45


@pytest.mark.parametrize("scheme", ["mxfp4", "uint4_wo_32", "nvfp4"])
@pytest.mark.parametrize("spectrum", ["white", "power law"])
def test_other_formats_too(scheme: str, spectrum: str) -> None:
    found = {tokens: ratio("gptq", spectrum, tokens, scheme) for tokens in (1, 16, 128, 512)}
    assert max(found.values()) <= 1.001, found  # of white inputs there is nothing to know: codes at ties differ


def test_the_share_that_is_chance_is_all_of_it_for_white_inputs_and_falls_with_the_number_of_tokens() -> None:
    found = []
    for tokens in (1, 32, 128, 2048):
        hessian = Hessian(K, torch.device("cpu"))
        hessian.update(inputs("power law").x[:tokens])
        found.append(hessian.shrinkage()[0])
    assert found[0] == 1
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.02
    hessian = Hessian(K, torch.device("cpu"))
    hessian.update(inputs("white").x)
    assert hessian.shrinkage()[0] > 0.9
