"""What this distribution registers keeps the contracts of the plugin API: the conformance suite, a test class for each record."""

from __future__ import annotations

from quark.plugins.catalog import catalog
from quark_devkit import MetricConformance, SelectorConformance, subjects

_BASES = {"metric": MetricConformance, "selector": SelectorConformance}
globals().update(
    {
        f"Test_{subject.name}": type(f"Test_{subject.name}", (base,), {"subject": subject.name, "__module__": __name__})
        for kind, base in _BASES.items()
        for subject in subjects(catalog(), "quark-workbench", [kind])
    }
)


def test_every_metric_and_the_selector_have_classes() -> None:
    assert {"Test_accuracy", "Test_entropy", "Test_total_variation", "Test_mixed_precision"} <= globals().keys()
