"""The hooks of acme-quant.

No torch here, since every listing imports this file: records point at the rest by name.
"""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import AlgorithmRecord, FormatRecord, ObserverRecord, SchemeRecord, hookimpl

__all__ = ["QUARK_API", "quark_register_algorithms", "quark_register_formats", "quark_register_observers", "quark_register_schemes"]

QUARK_API = (2, 2)
"""Versions of the plugin API that this plugin is written for."""


@hookimpl
def quark_register_formats() -> Iterator[FormatRecord]:
    """Yield one number format."""
    yield FormatRecord(
        name="acme_nf3", bits=3, format="acme_quant.codebook:ACME_NF3", summary="eight normal quantiles in [-1, 1], 0 among them"
    )


@hookimpl
def quark_register_observers() -> Iterator[ObserverRecord]:
    """Yield one observer. Specs name it by its class name, and so do checkpoints."""
    yield ObserverRecord(
        name="acme_rms",
        class_name="AcmeRmsObserver",
        observer="acme_quant.observer:AcmeRmsObserver",
        summary="a multiple of the root mean square, no more than was seen; option multiple (2.15)",
    )


@hookimpl
def quark_register_schemes() -> Iterator[SchemeRecord]:
    """Yield one scheme."""
    yield SchemeRecord(
        name="acme_nf3_g64",
        config="acme_quant.schemes:acme_nf3_g64",
        summary="acme_nf3 weights, groups of 64",
        clients=("transformers",),
        stability="experimental",
    )


@hookimpl
def quark_register_algorithms() -> Iterator[AlgorithmRecord]:
    """Yield one algorithm: its settings, and the class that does the work."""
    yield AlgorithmRecord(
        name="acme_weighted",
        kind="rounding",
        config="acme_quant.weighted_config:AcmeWeightedConfig",
        processor="acme_quant.weighted:AcmeWeighted",
        capabilities={"calibration"},
        summary="scales searched by the mean square of each input channel, then round-to-nearest",
    )
