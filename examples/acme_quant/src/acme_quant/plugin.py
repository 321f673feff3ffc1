"""The hooks of acme-quant.

Every command that lists plugins imports this file, so the file does not import torch. Records refer to other
modules by name.
"""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import AlgorithmRecord, FormatRecord, ObserverRecord, SchemeRecord, hookimpl

__all__ = ["QUARK_API", "quark_register_algorithms", "quark_register_formats", "quark_register_observers", "quark_register_schemes"]

QUARK_API = (2, 2)
"""Versions of the plugin API that this plugin is written for."""


@hookimpl
def quark_register_formats() -> Iterator[FormatRecord]:
    """Yield the record of one number format."""
    yield FormatRecord(
        name="acme_nf3", bits=3, format="acme_quant.codebook:ACME_NF3", summary="eight normal quantiles in [-1, 1], 0 among them"
    )


@hookimpl
def quark_register_observers() -> Iterator[ObserverRecord]:
    """Yield the record of one observer. Specs and checkpoints refer to the observer by the name of the
    class."""
    yield ObserverRecord(
        name="acme_rms",
        class_name="AcmeRmsObserver",
        observer="acme_quant.observer:AcmeRmsObserver",
        summary="range from a multiple of the root mean square, at most the largest magnitude; option multiple (2.15)",
    )


@hookimpl
def quark_register_schemes() -> Iterator[SchemeRecord]:
    """Yield the record of one scheme."""
    yield SchemeRecord(
        name="acme_nf3_g64",
        config="acme_quant.schemes:acme_nf3_g64",
        summary="acme_nf3 weights, groups of 64",
        clients=("transformers",),
        stability="experimental",
    )


@hookimpl
def quark_register_algorithms() -> Iterator[AlgorithmRecord]:
    """Yield the record of one algorithm. It names the class of the settings and the class of the
    algorithm."""
    yield AlgorithmRecord(
        name="acme_weighted",
        kind="rounding",
        config="acme_quant.weighted_config:AcmeWeightedConfig",
        processor="acme_quant.weighted:AcmeWeighted",
        capabilities={"calibration"},
        summary="scales that minimize errors weighted by the inputs' mean squares, then round-to-nearest",
    )
