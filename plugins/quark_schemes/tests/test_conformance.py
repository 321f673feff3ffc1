"""Everything that quark-schemes registers keeps the contracts of the plugin API.

The conformance suite, a test class for each record.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quark.plugins.catalog import catalog
from quark_devkit import FormatConformance, ObserverConformance, SchemeConformance, subjects
from quark_devkit.classes import Conformance
from quark_devkit.extent import LAWS, WHOLE_RUNS

SEARCHING = {"per_tensor_mse", "per_channel_mse", "per_tensor_histogram"}
"""Observers that search their range: seconds for many of them. Others that do are per_group_mse and
per_tensor_histogram_pro.
"""
EVERY = 5
"""The laws of fresh processes are slow tests but for about every fifth record, by the length of its name."""
_CLASSES: tuple[type[Conformance], ...] = (FormatConformance, ObserverConformance, SchemeConformance)


def _test_classes() -> Iterator[type[Conformance]]:
    for base in _CLASSES:
        for subject in subjects(catalog(), "quark-schemes", [base.kind]):
            name = f"Test{base.kind.title()}_{subject.name}"
            slow = [*(WHOLE_RUNS if subject.name in SEARCHING else ()), *(LAWS if len(subject.name) % EVERY else ())]
            marks = [pytest.mark.slow_runs(*slow)] if slow else []
            yield type(name, (base,), {"subject": subject.name, "__module__": __name__, "__doc__": f"{subject}.", "pytestmark": marks})


globals().update({test_class.__name__: test_class for test_class in _test_classes()})


def test_records_of_every_kind_have_classes() -> None:
    assert {"TestFormat_int4", "TestObserver_min_max", "TestScheme_fp8"} <= globals().keys()
