"""The core's own layer types pass the conformance suite, a test class for each."""

from __future__ import annotations

from quark.plugins.catalog import catalog
from quark_devkit import LayerTypeConformance, subjects

globals().update(
    {
        f"Test_{subject.name}": type(f"Test_{subject.name}", (LayerTypeConformance,), {"subject": subject.name, "__module__": __name__})
        for subject in subjects(catalog(), "quark-core", ["layer_type"])
    }
)


def test_layer_types_have_classes() -> None:
    assert {"Test_linear", "Test_conv1d", "Test_embedding"} <= globals().keys()
