"""Settings of the algorithms that tune a rounded block by its output: tuning and autoround."""

from __future__ import annotations

from typing import Annotated, Self

import attrs
from attrs import validators

from quark.config.algorithm import AlgoConfig
from quark.config.fields import with_dataclass_view
from quark.plugins import OptionNote
from quark_algos.fields import positive

__all__ = ["DTYPES", "MOST_STEPS", "TARGETS", "AutoRoundConfig", "TuningConfig"]

DTYPES = ("auto", "bfloat16", "float32")
"""Dtypes in which products are computed while a block is tuned."""
TARGETS = ("model", "block")
"""Target of a tuned block: the float model's hidden states, or the float block's output for the quantized
model's input.
"""

MOST_STEPS = 32
"""Largest number of steps per epoch; more samples get larger batches.

With twice as many, two real models have 6 % more KL divergence; with half as many, one of them has 10 % more.
"""


@with_dataclass_view
@attrs.define(kw_only=True)
class TuningConfig(AlgoConfig):
    """Tuning: few steps of gradient descent from the solution of a rounding.

    It works after GPTQ, AWQ, round-to-nearest and others.

    Attributes:
        epochs: Passes over the calibration samples.
        batch_size: Calibration batches for each step; None for at most `MOST_STEPS` steps per epoch.
        rounding: Tune the choice between two neighbouring values for each weight.
        scales: Tune the scales of weights if the format stores them finely enough.
        norms: Tune norm weights and biases.
        lr: Step of the rounding, in distances of two neighbouring values. It falls to 0 linearly, and so do
            ``scale_lr`` and ``norm_lr``.
        scale_lr: Step of scales, relative.
        norm_lr: Step of norm weights and biases, relative to their mean magnitude.
        margin: Smallest initial distance of a weight from the threshold between two values, in units of their
            distance; 0 to 0.5.
        target: ``"model"`` for the hidden states of the float model, ``"block"`` for the output of the float
            block on the quantized model's input.
        compute_dtype: Dtype of products while a block is tuned: ``"bfloat16"``, ``"float32"``, or ``"auto"``:
            bfloat16, except on a CPU without vector instructions for it.
        patience: Number of consecutive epochs with a larger held-out error than the first, after which tuning
            stops.
        seed: Seed of the order of samples.
    """

    name: str = "tuning"
    epochs: int = attrs.field(default=4, validator=positive)
    batch_size: int | None = attrs.field(default=None, validator=validators.optional(positive))
    rounding: bool = True
    scales: bool = True
    norms: bool = True
    lr: float = attrs.field(default=0.015, validator=positive)
    scale_lr: float = attrs.field(default=2e-3, validator=positive)
    norm_lr: float = attrs.field(default=2e-3, validator=positive)
    margin: float = attrs.field(default=0.1, validator=[validators.ge(0), validators.le(0.5)])
    target: str = attrs.field(default="model", validator=validators.in_(TARGETS))
    compute_dtype: str = attrs.field(default="auto", validator=validators.in_(DTYPES))
    patience: Annotated[int, OptionNote(is_cost_only=True)] = attrs.field(
        default=3, validator=positive
    )  # in any case, a block whose held-out error does not fall keeps its rounding
    seed: int = 0


@with_dataclass_view
@attrs.define(kw_only=True)
class AutoRoundConfig(AlgoConfig):
    """AutoRound as published (arXiv 2309.05516).

    Rounding offsets and clipping by signed gradient descent, from round-to-nearest.

    As in the package ``auto-round``, inputs come from the quantized model and targets from the float model.

    Attributes:
        iters: Steps for each block.
        lr: First step of rounding offsets, in distances of two neighbouring values, which falls to 0
            linearly; None is 1 / iters.
        minmax_lr: First step of the ranges' factors; None is ``lr``.
        enable_minmax_tuning: Tune the range of each group if the format stores scales finely enough.
        batch_size: Calibration batches for each step.
        compute_dtype: Dtype of products while a block is tuned: ``"bfloat16"``, ``"float32"``, or ``"auto"``:
            bfloat16, except on a CPU without vector instructions for it.
    """

    name: str = "autoround"
    iters: int = attrs.field(default=200, validator=positive)
    lr: float | None = attrs.field(default=None, validator=validators.optional(positive))
    minmax_lr: float | None = attrs.field(default=None, validator=validators.optional(positive))
    enable_minmax_tuning: bool = True
    batch_size: int = attrs.field(default=8, validator=positive)
    compute_dtype: str = attrs.field(default="auto", validator=validators.in_(DTYPES))

    def resolved(self) -> Self:
        """Return the settings with the first steps."""
        lr = self.lr or 1 / self.iters
        return attrs.evolve(self, lr=lr, minmax_lr=self.minmax_lr or lr)
