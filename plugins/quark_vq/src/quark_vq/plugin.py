"""The plugin of quark-vq. It has the records of two number formats, an observer and four schemes.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import FormatRecord, ObserverRecord, SchemeRecord, hookimpl

__all__ = ["QUARK_API", "quark_register_formats", "quark_register_observers", "quark_register_schemes"]

QUARK_API = (2, 2)
"""Versions of the plugin API that this plugin supports."""


@hookimpl
def quark_register_formats() -> Iterator[FormatRecord]:
    """Yield the records of the number formats."""
    yield FormatRecord(name="vq2", bits=2, format="quark_vq.codebook:VQ2", summary="four weights, one of 256 learned vectors")
    yield FormatRecord(name="vq3", bits=3, format="quark_vq.codebook:VQ3", summary="two weights, one of 64 learned vectors")


@hookimpl
def quark_register_observers() -> Iterator[ObserverRecord]:
    """Yield the record of the observer that computes the scales."""
    yield ObserverRecord(
        name="rms", class_name="RMSObserver", observer="quark_vq.observer:RMSObserver", summary="the root of the mean square, both ways"
    )


@hookimpl
def quark_register_schemes() -> Iterator[SchemeRecord]:
    """Yield the records of the schemes."""
    for bits, vector in ((2, "four"), (3, "two")):
        yield SchemeRecord(
            name=f"vq{bits}",
            config=f"quark_vq.schemes:vq{bits}",
            summary=f"{bits}-bit codebooks of {vector} weights, one for each layer, a scale per channel",
            clients=("transformers",),
        )
        yield SchemeRecord(
            name=f"vq{bits}_g64",
            config=f"quark_vq.schemes:vq{bits}_g64",
            summary=f"{bits}-bit codebooks of {vector} weights, one for each layer, groups of 64",
            clients=("transformers",),
        )
