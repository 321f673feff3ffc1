"""The conformance suite on graph mode, and on the operators of torch, a test class for each."""

from __future__ import annotations

from quark.plugins.catalog import catalog
from quark_devkit import GraphOpConformance, QuantModeConformance, subjects

globals().update(
    {
        f"Test_{subject.name}": type(f"Test_{subject.name}", (GraphOpConformance,), {"subject": subject.name, "__module__": __name__})
        for subject in subjects(catalog(), "quark-graph", ["graph_op"])
    }
)


class TestFxGraphMode(QuantModeConformance):
    subject = "fx_graph_mode"


def test_operators_have_classes() -> None:
    assert {"Test_conv2d", "Test_cat", "Test_softmax"} <= globals().keys()
