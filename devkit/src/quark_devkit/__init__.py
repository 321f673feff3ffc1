"""The conformance suite for plugin authors.

You can run the same checks in three ways: a test class
(``class TestAcme(SchemeConformance): subject = "acme_int3"``), pytest without a test file
(``pytest --quark-conformance acme-quant``), and the command line (``quark check acme-quant``).

Names are imported on first use, since pytest imports this package in every session.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark_devkit.catalogue import all_checks
    from quark_devkit.check import Check, CheckFailedError, NotApplicableError
    from quark_devkit.classes import (
        BlockTuningConformance,
        BranchConformance,
        Conformance,
        DatasetConformance,
        DistributionConformance,
        FormatConformance,
        GraphOpConformance,
        LayerTypeConformance,
        LayoutConformance,
        MetricConformance,
        ObserverConformance,
        QuantModeConformance,
        RoundingConformance,
        SchemeConformance,
        SelectorConformance,
        TemplateConformance,
        TransformConformance,
    )
    from quark_devkit.runner import Result, run_check, run_checks
    from quark_devkit.subject import Subject, find_subject, subjects

__all__ = [
    "BlockTuningConformance",
    "BranchConformance",
    "Check",
    "CheckFailedError",
    "Conformance",
    "DatasetConformance",
    "DistributionConformance",
    "FormatConformance",
    "GraphOpConformance",
    "LayerTypeConformance",
    "LayoutConformance",
    "MetricConformance",
    "NotApplicableError",
    "ObserverConformance",
    "QuantModeConformance",
    "Result",
    "RoundingConformance",
    "SchemeConformance",
    "SelectorConformance",
    "Subject",
    "TemplateConformance",
    "TransformConformance",
    "all_checks",
    "find_subject",
    "run_check",
    "run_checks",
    "subjects",
]

_MODULES = ("check", "classes", "runner", "subject", "catalogue")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = import_module(f"quark_devkit.{module}")
            if name in getattr(found, "__all__", ()):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
