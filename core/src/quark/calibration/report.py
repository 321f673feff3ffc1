"""CalibrationReport: stores the metrics of a run, and writes log lines about them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import attrs

from quark.base.log import get_logger
from quark.base.names import folded
from quark.base.ranks import Ranks
from quark.calibration.rounding_validation import REASON

FEW = 0.05
"""A layer of an expert has few tokens if its number of tokens is less than this share of the mean over the
layers of all experts.
"""

HARM = 2.0
"""A model is considered worse than round-to-nearest if its error is larger by more than this many standard
errors.
"""


@attrs.define(eq=False)
class CalibrationReport:
    """The metrics of a run. Their values are JSON values.

    Attributes:
        model_error: The relative squared errors of the last block's output, measured on a few tokens.
            ``error`` is the error with the run's rounding. ``nearest_error`` is the error with all layers
            rounded to nearest. ``standard_error`` is the standard error of the difference of both errors.
            Empty if nothing was measured.
        layers: For each layer that was rounded with statistics, the number of ``tokens`` that reached it and
            the metrics of the algorithm (damping, errors, …).
        tokens: For each layer of an expert, the number of tokens that reached it.
        transformed: The metrics that transforms report, by full name of a layer or block.
        tuned: The metrics that tunings report, by full name of a layer or block and then by name of the
            tuning. The metrics of a block include ``error_before``, ``error_after`` and ``applied``, which
            tells whether the tuning was applied.
        validated: A dictionary from the name of each validated transform to the result of its validation. The
            result has the errors before and after the transform, and tells whether the transform was applied.
        applied: Positions of the transforms that have changed any block, in the run's list of transforms.
        unreached: Layers that no token reached, although they should have been rounded with statistics. They
            are rounded to nearest.
        weights: The metrics that plugins add for layers with a rounded weight and for their inputs
            (`quark.plugins.measuring.LayersRounded`). For example, quark-workbench adds ``snr_db``.
        histograms: The histograms that plugins add for the worst layers.
        blocks: The metrics of each block: the ``seconds`` of each phase (`quark.calibration.phases.PHASES`),
            the ``bytes`` of the block's tensors, the ``flops`` of forward passes and statistics, and metrics
            that plugins add.
        seconds: The seconds that the whole run has spent in each phase.
    """

    model_error: dict[str, Any] = attrs.field(factory=dict)
    layers: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    tokens: dict[str, int] = attrs.field(factory=dict)
    unreached: list[str] = attrs.field(factory=list)
    transformed: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    tuned: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    validated: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    applied: set[int] = attrs.field(factory=set)
    weights: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    histograms: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    blocks: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    seconds: dict[str, float] = attrs.field(factory=dict)

    def join_with(self, ranks: Ranks, blocks: Sequence[str]) -> None:
        """Add the metrics of all other ranks.

        Args:
            ranks: The ranks of the run. Every rank must call this method.
            blocks: Names of all blocks, in order.
        """
        for other in ranks.gather(self):
            self._update(other, "model_error", "layers", "tokens", "transformed", "tuned", "applied")
            self.unreached += [name for name in other.unreached if name not in self.unreached]
            # If all ranks have worked on a block, each rank keeps its own metrics, which are about its own
            # samples and its own time.
            self.weights = other.weights | self.weights
            self.blocks = other.blocks | self.blocks
            self.histograms = other.histograms | self.histograms
        self.blocks = {name: self.blocks.pop(name) for name in blocks if name in self.blocks} | self.blocks

    def remarks(self) -> Iterator[str]:
        """Yield log lines for the level INFO: the model's error, and how many tokens reached the experts."""
        if self.model_error:
            yield f"{self._compared} ({self.model_error['tokens']} tokens)."
        if self.tokens:
            reached = [count for count in self.tokens.values() if count]
            share = f"{len(reached)} of {len(self.tokens)}" if len(reached) < len(self.tokens) else len(reached)
            fewest, most = min(reached, default=0), max(reached, default=0)
            counts = f"{fewest} to {most} tokens" if fewest < most else f"{most} token{'s' * (most != 1)}"
            yield f"Calibration reached {share} layers of experts with {counts}, {self._mean_tokens} on average."

    def lines(self) -> Iterator[str]:
        """Yield log lines for the level WARNING. They say why another run should use more data or another
        algorithm.
        """
        if self.does_harm:
            yield f"The model is worse than rounded to nearest. Leave out the algorithm, use another, or give more data. {self._compared}."
        few = {n: t for n, t in self.tokens.items() if t * len(self.tokens) < FEW * sum(self.tokens.values())}
        if few:
            worst = min(few, key=lambda n: few[n])
            share = f"less than {FEW:.0%} of the average of {self._mean_tokens} tokens; '{worst}' got fewest, {few[worst]}"
            got = share if any(few.values()) else f"no token, such as '{worst}'"
            yield f"{len(few)} of {len(self.tokens)} layers of experts got {got}. Use more data, or set calibrate_all_experts=True."
        few_layers = [n for n, metrics in self.layers.items() if metrics.get("few_tokens")]
        if few_layers:
            fewest = min(self.layers[name]["tokens"] for name in few_layers)
            yield (
                f"{len(few_layers)} of {len(self.layers)} layers got fewer tokens than they have input channels (the fewest: {fewest}): "
                f"{folded(few_layers)}. Stronger damping is used for these layers. Use more calibration data."
            )
        if any(metrics.get("held_out") is False for metrics in (*self.transformed.values(), *self.validated.values())):
            yield (
                "Transforms were validated on the tokens that they were fitted to, because there were too few tokens to hold any out. Use "
                "more calibration data."
            )
        yield from self._validated()
        if self.unreached:
            yield (
                f"No calibration token reached {len(self.unreached)} layer(s): {folded(self.unreached)}. "
                "Their weights are rounded to nearest."
            )

    @property
    def _compared(self) -> str:
        """A sentence about the error of the last block's output, for log lines."""
        own, nearest = (math.nan if (e := self.model_error[name]) is None else e for name in ("error", "nearest_error"))
        return (
            f"The output of the last block has a relative squared error of {own:.3g}, and of {nearest:.3g} with all layers rounded to "
            "nearest"
        )

    @property
    def does_harm(self) -> bool:
        """Whether the model is significantly worse than with all layers rounded to nearest."""
        error, nearest, deviation = (self.model_error.get(name) for name in ("error", "nearest_error", "standard_error"))
        if nearest is None:
            return False
        return error is None or (deviation is not None and error > nearest + HARM * deviation)

    def _validated(self) -> Iterator[str]:
        """Yield log lines about layers that were rounded to nearest although another algorithm was chosen."""
        worse = {n: f["held_out_error"] for n, f in self.layers.items() if REASON in f and "held_out_error" in f}
        if worse:
            worst = max(worse, key=lambda n: worse[n])
            yield (
                f"{len(worse)} of {len(self.layers)} layers are rounded to nearest, because the algorithm has a larger error on held-out "
                f"tokens. The worst is '{worst}' with {worse[worst]:.3g} times the error. Use more data, or another algorithm."
            )
        refused = {n: f[REASON] for n, f in self.layers.items() if REASON in f and n not in worse}
        if refused:
            first = next(iter(refused))
            yield f"{len(refused)} of {len(self.layers)} layers are rounded to nearest; the first is '{first}': {refused[first]}."

    def log(self) -> None:
        """Write the lines of `remarks` and `lines` to the log."""
        for line in self.remarks():
            get_logger(__name__).info(line)
        for line in self.lines():
            get_logger(__name__).warning(line)

    @property
    def _mean_tokens(self) -> str:
        """The mean number of tokens of the experts' layers, as a text for log lines."""
        mean = sum(self.tokens.values()) / max(len(self.tokens), 1)
        return f"{mean:.0f}" if mean >= 10 else f"{mean:.2g}"

    def extend(self, other: CalibrationReport) -> None:
        """Add the metrics that ``other`` has for another block."""
        self._update(other, "layers", "tokens", "transformed", "tuned", "validated", "applied", "weights", "histograms", "blocks")
        self.unreached += other.unreached

    def _update(self, other: CalibrationReport, *names: str) -> None:
        """Add the entries that another report has in the fields ``names``."""
        for name in names:
            getattr(self, name).update(getattr(other, name))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a report from the dictionary ``values`` that `to_dict` has returned."""
        fields = {f.name: values[f.name] for f in attrs.fields(cls) if f.name in values}
        return cls(**{**fields, "tokens": values["expert_tokens"], "applied": set(values["applied"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary of JSON values."""
        values = attrs.asdict(self, recurse=False) | {"applied": sorted(self.applied)}
        return {"expert_tokens" if name == "tokens" else name: value for name, value in values.items()}
