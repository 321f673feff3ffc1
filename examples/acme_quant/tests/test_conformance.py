"""The conformance suite on acme-quant: one class for each of its records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import acme_quant.plugin
from quark.plugins import Catalog, Source, using
from quark.plugins.discovery import discover
from quark_devkit import FormatConformance, ObserverConformance, RoundingConformance, SchemeConformance

WITH_ACME = Catalog(candidate for candidate in discover() if candidate.source.distribution != "acme-quant")
WITH_ACME.add(acme_quant.plugin, Source("acme-quant", "0.1.0"))


@pytest.fixture(autouse=True)
def acme() -> Iterator[None]:
    """The plugin, whether it is installed or not.

    If your plugin is installed, you need only the classes below.
    """
    with using(WITH_ACME):
        yield


class TestFormat(FormatConformance):
    """The number format."""

    subject = "acme_nf3"


class TestObserver(ObserverConformance):
    """The observer."""

    subject = "acme_rms"


class TestScheme(SchemeConformance):
    """The scheme."""

    subject = "acme_nf3_g64"


class TestRounding(RoundingConformance):
    """The algorithm."""

    subject = "acme_weighted"
