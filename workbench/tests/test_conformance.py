"""The conformance suite on this distribution, and on each metric and the selector that it registers."""

from __future__ import annotations

import pytest

from quark.plugins.catalog import catalog
from quark_devkit import DistributionConformance, MetricConformance, SelectorConformance, subjects


class TestDistribution(DistributionConformance):
    subject = "quark-workbench"


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


@pytest.mark.parametrize("name", ["quantize", "plan", "evaluate", "report", "inspect"])
def test_every_command_comes_from_here(name: str) -> None:
    assert catalog().commands.source(name).distribution == "quark-workbench"
