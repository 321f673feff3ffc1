"""Everything that quark-vq registers keeps the contracts of the plugin API: a test class for each record."""

from __future__ import annotations

from quark.plugins.catalog import catalog
from quark_devkit import FormatConformance, ObserverConformance, SchemeConformance, subjects

globals().update(
    {
        f"Test{base.kind.title()}_{subject.name}": type(
            f"Test{base.kind.title()}_{subject.name}", (base,), {"subject": subject.name, "__module__": __name__}
        )
        for base in (FormatConformance, ObserverConformance, SchemeConformance)
        for subject in subjects(catalog(), "quark-vq", [base.kind])
    }
)


def test_records_of_every_kind_have_classes() -> None:
    assert {"TestFormat_vq2", "TestObserver_rms", "TestScheme_vq3_g64"} <= globals().keys()
