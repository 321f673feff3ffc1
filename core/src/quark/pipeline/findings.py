"""Findings: what a run has to say about the layers it rounded, and about those that calibration hardly reached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from quark.log import get_logger
from quark.pipeline.validated_rounding import REASON

FEW = 0.05
"""A layer of an expert has few tokens if it has less than this share of what its siblings have on average."""


@attrs.define(eq=False)
class Findings:
    """What was found, by full name of the layer; JSON values.

    Attributes:
        layers: Figures of each layer that calibrated rounding has rounded: ``tokens``, and what the algorithm says (damping, errors, …).
        tokens: How many tokens reached each layer of an expert.
        transformed: What transforms say of layers and blocks.
        judged: Of transforms that change the whole model, by name: errors before and after, and whether they were applied.
        unreached: Layers that were to be rounded by their inputs and got none: they are rounded to nearest.
    """

    layers: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    tokens: dict[str, int] = attrs.field(factory=dict)
    unreached: list[str] = attrs.field(factory=list)
    transformed: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    judged: dict[str, dict[str, Any]] = attrs.field(factory=dict)

    def add(self, figures: Mapping[str, dict[str, Any]]) -> None:
        """Take in the figures of more layers."""
        self.layers |= figures

    def count(self, tokens: Mapping[str, int]) -> None:
        """Take in token counts of one block's experts."""
        self.tokens |= tokens

    def missed(self, names: Iterable[str]) -> None:
        """Layers that no token has reached."""
        self.unreached += names

    def lines(self) -> Iterator[str]:
        """What people should know."""
        if self.tokens:
            mean = sum(self.tokens.values()) / len(self.tokens)
            few = {n: t for n, t in self.tokens.items() if t < FEW * mean}
            counts = f"{min(self.tokens.values())} to {max(self.tokens.values())} tokens, {mean:.0f} on average"
            yield f"Calibration reached {len(self.tokens)} layers of experts with {counts}."
            if few:
                worst = min(few, key=lambda n: few[n])
                yield (
                    f"{len(few)} of them got less than {FEW:.0%} of the average; the least, '{worst}', {few[worst]}. More data, or "
                    "calibrate_all_experts=True, reach them."
                )
        few_layers = [n for n, figures in self.layers.items() if figures.get("few_tokens")]
        if few_layers:
            yield (
                f"{len(few_layers)} of {len(self.layers)} layers got fewer tokens than they have input channels, the first is "
                f"'{few_layers[0]}' with {self.layers[few_layers[0]]['tokens']}: they are rounded more cautiously. More data do better."
            )
        yield from self._validated()
        if self.unreached:
            yield (
                f"No calibration token reached {len(self.unreached)} layer(s), the first is '{self.unreached[0]}': "
                "their weights are rounded to nearest."
            )

    def _validated(self) -> Iterator[str]:
        """Of layers that were rounded to nearest instead of by the algorithm."""
        worse = {n: f["held_out_error"] for n, f in self.layers.items() if REASON in f and "held_out_error" in f}
        if worse:
            worst = max(worse, key=lambda n: worse[n])
            yield (
                f"{len(worse)} of {len(self.layers)} layers are rounded to nearest, since the algorithm does worse on held-out tokens; the "
                f"worst is '{worst}' with {worse[worst]:.3g} times the error. More data, or another algorithm, do better."
            )
        refused = {n: f[REASON] for n, f in self.layers.items() if REASON in f and n not in worse}
        if refused:
            first = next(iter(refused))
            yield f"{len(refused)} of {len(self.layers)} layers are rounded to nearest; the first is '{first}': {refused[first]}."

    def log(self) -> None:
        """Tell people."""
        for line in self.lines():
            get_logger(__name__).warning(line)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "layers": self.layers,
            "expert_tokens": self.tokens,
            "unreached": self.unreached,
            "transformed": self.transformed,
            "judged": self.judged,
        }
