"""Division by a number gives the same bits on every device, and ratios convert to decibels."""

from __future__ import annotations

import math

import torch

from quark.base.scalars import decibels, divided
from quark_devkit.simulated_device import NAME, simulated_device


def test_a_quotient_is_rounded_once_on_every_device() -> None:
    x = torch.arange(1.0, 1001.0)
    with simulated_device():
        by_reciprocal, found = (x.to(NAME) / 7.5).cpu(), divided(x.to(NAME), 7.5).cpu()
    assert torch.equal(found, x / 7.5)
    assert torch.equal(divided(x, 7.5), x / 7.5)
    assert not torch.equal(by_reciprocal, x / 7.5), "the device does not divide as CUDA does"


def test_a_ratio_without_signal_or_noise_has_no_decibels() -> None:
    assert decibels(0.0, 1.0) is decibels(1.0, 0.0) is decibels(math.nan, 1.0) is decibels(math.inf, 1.0) is None
