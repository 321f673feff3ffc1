"""The workbench's sources of text keep the contracts of the plugin API.

The conformance suite, a test class for each.
"""

from __future__ import annotations

from quark.plugins.catalog import catalog
from quark_devkit import DatasetConformance, subjects

globals().update(
    {
        f"Test_{subject.name}": type(f"Test_{subject.name}", (DatasetConformance,), {"subject": subject.name, "__module__": __name__})
        for subject in subjects(catalog(), "quark-workbench", ["dataset"])
    }
)


def test_sources_have_classes() -> None:
    assert {"Test_text", "Test_json_lines", "Test_parquet", "Test_pileval"} <= globals().keys()
