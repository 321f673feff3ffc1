"""The core's own metrics keep the contracts of the plugin API: the conformance suite, a test class for each."""

from __future__ import annotations

from quark.plugins.catalog import catalog
from quark_devkit import MetricConformance, subjects

globals().update(
    {
        f"Test_{subject.name}": type(f"Test_{subject.name}", (MetricConformance,), {"subject": subject.name, "__module__": __name__})
        for subject in subjects(catalog(), "quark-core", ["metric"])
    }
)


def test_metrics_have_classes() -> None:
    assert {"Test_accuracy", "Test_entropy", "Test_total_variation"} <= globals().keys()
