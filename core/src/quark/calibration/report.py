"""CalibrationReport: metrics of the rounded layers, and the layers that got few calibration tokens."""

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
"""An expert's layer has few tokens if it has less than this share of the mean over all experts' layers."""

HARM = 2.0
"""Number of standard errors by which a model must be worse than round-to-nearest to count as worse."""


@attrs.define(eq=False)
class CalibrationReport:
    """The metrics of a run, as JSON values by full name of the layer.

    Attributes:
        model_error: The relative squared error of the last block's output, on a few tokens: ``error`` as the
            run rounds, ``nearest_error`` with all layers rounded to nearest, and the ``standard_error`` of
            their difference. Empty if it was not measured.
        layers: Metrics of each layer that calibrated rounding has rounded: ``tokens``, and the algorithm's
            metrics (damping, errors, …).
        tokens: The number of tokens that reached each layer of an expert.
        transformed: Metrics that transforms report for layers and blocks.
        tuned: Metrics of layers and blocks, each by name of the tuning that reports them. For a block:
            ``error_before``, ``error_after``, and whether it was ``applied``.
        validated: Validation of transforms of the whole model, by name: errors before and after, and whether
            the transform was applied.
        applied: Positions, in the order of the run, of the transforms that have changed any block.
        unreached: Layers that no token reached, although calibrated rounding applies to them; they are
            rounded to nearest.
        weights: Metrics of layers with a rounded weight, and of their inputs, which plugins add
            (`quark.plugins.measuring.LayersRounded`): quark-workbench adds ``snr_db`` and others.
        histograms: Histograms of the worst layers, which plugins add.
        blocks: Metrics of each block: ``seconds`` by phase (`quark.calibration.phases.PHASES`), ``bytes`` of
            its tensors, ``flops`` of forward passes and statistics, and metrics that plugins add.
        seconds: Seconds of the whole run by phase.
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
        """Add the metrics of other ranks for their blocks; ``blocks`` are all blocks in order."""
        for other in ranks.gather(self):
            self._update(other, "model_error", "layers", "tokens", "transformed", "tuned", "applied")
            self.unreached += [name for name in other.unreached if name not in self.unreached]
            # For work that all ranks share, each rank keeps its own metrics: of its samples and its time.
            self.weights = other.weights | self.weights
            self.blocks = other.blocks | self.blocks
            self.histograms = other.histograms | self.histograms
        self.blocks = {name: self.blocks.pop(name) for name in blocks if name in self.blocks} | self.blocks

    def remarks(self) -> Iterator[str]:
        """Yield log lines for the level INFO."""
        if self.model_error:
            yield f"{self._compared} ({self.model_error['tokens']} tokens)."
        if self.tokens:
            reached = [count for count in self.tokens.values() if count]
            share = f"{len(reached)} of {len(self.tokens)}" if len(reached) < len(self.tokens) else len(reached)
            fewest, most = min(reached, default=0), max(reached, default=0)
            counts = f"{fewest} to {most} tokens" if fewest < most else f"{most} token{'s' * (most != 1)}"
            yield f"Calibration reached {share} layers of experts with {counts}, {self._mean_tokens} on average."

    def lines(self) -> Iterator[str]:
        """Yield log lines for the level WARNING: reasons to run again with more data or another algorithm."""
        if self.does_harm:
            yield f"The model is worse than rounded to nearest: leave the algorithm out, use another, or give more data. {self._compared}."
        few = {n: t for n, t in self.tokens.items() if t * len(self.tokens) < FEW * sum(self.tokens.values())}
        if few:
            worst = min(few, key=lambda n: few[n])
            share = f"less than {FEW:.0%} of the average of {self._mean_tokens} tokens; '{worst}' got fewest, {few[worst]}"
            got = share if any(few.values()) else f"no token, such as '{worst}'"
            yield f"{len(few)} of {len(self.tokens)} layers of experts got {got}. Use more data, or calibrate_all_experts=True."
        few_layers = [n for n, metrics in self.layers.items() if metrics.get("few_tokens")]
        if few_layers:
            fewest = min(self.layers[name]["tokens"] for name in few_layers)
            yield (
                f"{len(few_layers)} of {len(self.layers)} layers got fewer tokens than they have input channels (the fewest: {fewest}): "
                f"{folded(few_layers)}. They are damped more strongly; use more calibration data."
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
        """The comparison of the last block's output, for messages."""
        own, nearest = (math.nan if (e := self.model_error[name]) is None else e for name in ("error", "nearest_error"))
        return (
            f"The output of the last block has a relative squared error of {own:.3g}, and of {nearest:.3g} with all layers rounded to "
            "nearest"
        )

    @property
    def does_harm(self) -> bool:
        """Whether the model is worse than with all layers rounded to nearest, by more than chance."""
        error, nearest, deviation = (self.model_error.get(name) for name in ("error", "nearest_error", "standard_error"))
        if nearest is None:
            return False
        return error is None or (deviation is not None and error > nearest + HARM * deviation)

    def _validated(self) -> Iterator[str]:
        """Yield log lines on layers that were rounded to nearest instead of by the algorithm."""
        worse = {n: f["held_out_error"] for n, f in self.layers.items() if REASON in f and "held_out_error" in f}
        if worse:
            worst = max(worse, key=lambda n: worse[n])
            yield (
                f"{len(worse)} of {len(self.layers)} layers are rounded to nearest, because the algorithm does worse on held-out tokens; "
                f"the worst is '{worst}' with {worse[worst]:.3g} times the error. Use more data, or another algorithm."
            )
        refused = {n: f[REASON] for n, f in self.layers.items() if REASON in f and n not in worse}
        if refused:
            first = next(iter(refused))
            yield f"{len(refused)} of {len(self.layers)} layers are rounded to nearest; the first is '{first}': {refused[first]}."

    def log(self) -> None:
        """Write all lines to the log."""
        for line in self.remarks():
            get_logger(__name__).info(line)
        for line in self.lines():
            get_logger(__name__).warning(line)

    @property
    def _mean_tokens(self) -> str:
        """The mean token count of the layers of experts, for messages; below 10, with two digits."""
        mean = sum(self.tokens.values()) / max(len(self.tokens), 1)
        return f"{mean:.0f}" if mean >= 10 else f"{mean:.2g}"

    def extend(self, other: CalibrationReport) -> None:
        """Add the report of another block."""
        self._update(other, "layers", "tokens", "transformed", "tuned", "validated", "applied", "weights", "histograms", "blocks")
        self.unreached += other.unreached

    def _update(self, other: CalibrationReport, *names: str) -> None:
        """Add the entries of fields of another report."""
        for name in names:
            getattr(self, name).update(getattr(other, name))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the report from the result of `to_dict`."""
        fields = {f.name: values[f.name] for f in attrs.fields(cls) if f.name in values}
        return cls(**{**fields, "tokens": values["expert_tokens"], "applied": set(values["applied"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON form."""
        values = attrs.asdict(self, recurse=False) | {"applied": sorted(self.applied)}
        return {"expert_tokens" if name == "tokens" else name: value for name, value in values.items()}
