"""The conformance suite on this distribution."""

from __future__ import annotations

from quark_devkit import DistributionConformance


class TestDistribution(DistributionConformance):
    subject = "quark-devkit"
