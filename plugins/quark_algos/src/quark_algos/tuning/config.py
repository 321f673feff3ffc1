"""Settings of ``tuning`` and ``autoround``. These algorithms tune a rounded block to reduce its output
error.
"""

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
"""The dtypes in which matrix products can be computed while a block is tuned."""
TARGETS = ("model", "block")
"""The targets of tuning. ``"model"``: the hidden states of the float model. ``"block"``: the output of the
float block for the input that it gets in the quantized model.
"""

MOST_STEPS = 32
"""Maximum number of steps per epoch. If there are more samples, batches are larger.

With twice as many steps, the KL divergence of two real models is 6 % higher. With half as many steps, it is
10 % higher for one of these models.
"""


@with_dataclass_view
@attrs.define(kw_only=True)
class TuningConfig(AlgoConfig):
    """Settings of ``tuning``: a few steps of gradient descent that start from the result of a rounding
    algorithm.

    Tuning can follow any rounding algorithm, such as GPTQ, AWQ or round-to-nearest.

    Attributes:
        epochs: Number of times that tuning uses each calibration sample.
        batch_size: Number of calibration batches for each step. If it is None, it is chosen so that an epoch
            has at most `MOST_STEPS` steps.
        rounding: Whether to tune the codes. For each weight, tuning chooses between two neighbouring grid
            values.
        scales: Whether to tune the scales of weights. Scales are tuned only if the format stores them with
            enough precision.
        norms: Whether to tune norm weights and biases.
        lr: Step size for the codes, in units of the distance between two neighbouring grid values. Like
            ``scale_lr`` and ``norm_lr``, it decreases linearly to 0.
        scale_lr: Step size of scales, relative to the scale.
        norm_lr: Step size of norm weights and biases, relative to their mean magnitude.
        margin: Minimum distance, at the start, between a weight and the rounding threshold between two grid
            values. It is in units of the distance between the two grid values, from 0 to 0.5.
        target: The target of the block's output. ``"model"`` means the hidden states of the float model.
            ``"block"`` means the output of the float block for the input of the block in the quantized model.
        compute_dtype: Dtype of matrix products while a block is tuned: ``"bfloat16"``, ``"float32"`` or
            ``"auto"``. ``"auto"`` means bfloat16, except on a CPU without vector instructions for bfloat16.
        patience: Tuning stops if this many consecutive epochs have a larger held-out error than the first
            epoch.
        seed: Seed for the order of the samples.
    """

    name: str = "tuning"
    epochs: Annotated[int, OptionNote(in_checks=2)] = attrs.field(default=4, validator=positive)
    batch_size: int | None = attrs.field(default=None, validator=validators.optional(positive))
    rounding: bool = True
    scales: bool = True
    norms: bool = True
    lr: Annotated[float, OptionNote(examples=(0.03, 0.06, 0.1), beside={"rounding": True})] = attrs.field(default=0.015, validator=positive)
    scale_lr: Annotated[float, OptionNote(beside={"scales": True})] = attrs.field(default=2e-3, validator=positive)
    norm_lr: Annotated[float, OptionNote(beside={"norms": True})] = attrs.field(default=2e-3, validator=positive)
    margin: Annotated[float, OptionNote(examples=(0.0, 0.03, 0.06), beside={"rounding": True})] = attrs.field(
        default=0.1, validator=[validators.ge(0), validators.le(0.5)]
    )  # from large margins no weight gets to the threshold in few steps
    target: str = attrs.field(default="model", validator=validators.in_(TARGETS))
    compute_dtype: str = attrs.field(default="auto", validator=validators.in_(DTYPES))
    patience: Annotated[int, OptionNote(is_cost_only=True)] = attrs.field(
        default=3, validator=positive
    )  # whatever the patience, a block keeps its rounding if its held-out error does not decrease
    seed: int = 0


@with_dataclass_view
@attrs.define(kw_only=True)
class AutoRoundConfig(AlgoConfig):
    """Settings of AutoRound as published (arXiv 2309.05516).

    AutoRound starts from round-to-nearest, and optimizes rounding offsets and clipping by signed gradient
    descent. As in the package ``auto-round``, inputs come from the quantized model and targets from the float
    model.

    Attributes:
        iters: Number of steps for each block.
        lr: Step size of rounding offsets in the first step, in units of the distance between two neighbouring
            values. It decreases linearly to 0. If it is None, it is 1 / ``iters``.
        minmax_lr: Step size of the factors of ranges in the first step. If it is None, it is ``lr``.
        enable_minmax_tuning: Whether to tune the range of each group. Ranges are tuned only if the format
            stores scales with enough precision.
        batch_size: Number of calibration batches for each step.
        compute_dtype: Dtype of matrix products while a block is tuned: ``"bfloat16"``, ``"float32"`` or
            ``"auto"``. ``"auto"`` means bfloat16, except on a CPU without vector instructions for bfloat16.
    """

    name: str = "autoround"
    iters: Annotated[int, OptionNote(in_checks=8)] = attrs.field(default=200, validator=positive)
    lr: Annotated[float | None, OptionNote(examples=(0.03, 0.06, 0.2))] = attrs.field(
        default=None, validator=validators.optional(positive)
    )  # offsets of a half are the largest, so that all steps above 1 are alike
    minmax_lr: Annotated[float | None, OptionNote(examples=(0.03, 0.06, 0.2), beside={"enable_minmax_tuning": True})] = attrs.field(
        default=None, validator=validators.optional(positive)
    )
    enable_minmax_tuning: bool = True
    batch_size: Annotated[int, OptionNote(examples=(1, 2, 3))] = attrs.field(default=8, validator=positive)
    compute_dtype: str = attrs.field(default="auto", validator=validators.in_(DTYPES))

    def resolved(self) -> Self:
        """Return a copy of the settings in which numbers replace None for ``lr`` and ``minmax_lr``."""
        lr = self.lr or 1 / self.iters
        return attrs.evolve(self, lr=lr, minmax_lr=self.minmax_lr or lr)
