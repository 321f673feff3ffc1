"""Tables of step functions are the functions, on every float32 number that is tried."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import quark
from quark.numbers import format_of, number_format, quantizer_for
from quark_exporters.onnx_layout.steps import Steps, steps_of


def looked_up(steps: Steps, x: Tensor) -> Tensor:
    return steps.values[torch.searchsorted(steps.thresholds, x, right=True)]


def numbers(signed: bool) -> Tensor:
    """Numbers of every exponent, and the halves and neighbours of those that small formats have."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7F800000, (20_000,), generator=generator, dtype=torch.int32)
    exact = torch.arange(0, 1 << 10) / 64
    near = torch.cat([exact, torch.nextafter(exact, torch.tensor(torch.inf)), torch.nextafter(exact, torch.tensor(0.0))])
    positive = torch.cat([bits.view(torch.float32), near])
    return torch.cat([positive, -positive]) if signed else positive


@pytest.mark.parametrize("name", ["fp4", "fp6_e2m3", "fp6_e3m2", "int4", "int8"])
def test_rounding_to_a_small_format_is_a_table(name: str) -> None:
    of = number_format(name)
    steps = steps_of(lambda t: of.round_(t.clone()), signed=True)
    assert steps is not None
    x = numbers(signed=True)
    assert torch.equal(looked_up(steps, x), of.round_(x.clone()))


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp6_e3m2", "amdfp4", "bfp16"])
def test_the_scale_of_a_block_is_a_table(scheme: str) -> None:
    spec = quark.schemes().get(scheme).config.load()().input_tensors
    level = quantizer_for(spec, activation=True).levels[0]

    def scale(high: Tensor) -> Tensor:
        return format_of(level.spec).qparams(torch.zeros_like(high), high, level.spec).scale.float()

    steps = steps_of(scale, signed=False)
    assert steps is not None
    x = numbers(signed=False)
    assert torch.equal(looked_up(steps, x), scale(x))


@pytest.mark.parametrize("function", [torch.sqrt, lambda x: x / 448])
def test_functions_of_many_values_are_not(function: Callable[[Tensor], Tensor]) -> None:
    assert steps_of(function, signed=False) is None
