"""Algorithms: a rounding, and a transform that runs with the model, of a role of its own."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import AlgorithmRecord, hookimpl


@hookimpl
def quark_register_algorithms() -> Iterator[AlgorithmRecord]:
    """The rounding and the transform."""
    yield AlgorithmRecord(
        name="clipped_nearest",
        summary="round to nearest under the range whose errors weigh least in the outputs",
        kind="rounding",
        config="third_party.settings:ClippedNearestConfig",
        processor="third_party.clipped_nearest:ClippedNearest",
        capabilities={"calibration"},
    )
    yield AlgorithmRecord(
        name="counted_nearest",
        summary="round to nearest, and count the layers: a rounding that needs no data",
        kind="rounding",
        config="third_party.settings:CountedNearestConfig",
        processor="third_party.clipped_nearest:CountedNearest",
    )
    yield AlgorithmRecord(
        name="input_gain",
        summary="multiply inputs of layers by powers of two while the model runs, and divide their weights",
        kind="transform",
        role="preconditioning",
        before=("equalization",),
        config="third_party.settings:InputGainConfig",
        processor="third_party.input_gain:InputGain",
        restorer="third_party.input_gain:InputGain",
    )
