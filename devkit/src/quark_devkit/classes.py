"""Test classes: one line in an author's tests runs every check of one record or distribution.

::

    from quark_devkit import SchemeConformance

    class TestAcmeInt3(SchemeConformance):
        subject = "acme_int3"

Every check becomes a test method, whose name is ``test_`` and the check's name. A subclass can neither
override nor remove a check. Declare an intended failure, with a reason, in ``pyproject.toml`` (see
`quark_devkit.expected_failures`).
"""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import attrs

from quark.plugins.catalog import catalog
from quark_devkit.catalogue import checks_of
from quark_devkit.check import Check, CheckFailedError
from quark_devkit.expected_failures import expected_failures, find_pyproject
from quark_devkit.runner import Result, run_check
from quark_devkit.subject import KINDS, find_subject

__all__ = ["Conformance", "raise_for"]
__all__ += [f"{kind.title().replace('_', '')}Conformance" for kind in KINDS]


class Conformance:
    """Base of the test classes; subclass the one for your kind of plugin.

    Attributes:
        kind: Kind of the subject; set by the class of that kind.
        subject: Registered name of the record, or name of the distribution.

    Raises:
        TypeError: When a subclass is defined, it names no subject, or it overrides or removes a check.
    """

    kind: ClassVar[str] = ""
    subject: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        if kind:
            cls.kind = kind
        if kind in KINDS and Conformance in cls.__bases__:
            for check in checks_of(kind):
                setattr(cls, f"test_{check.name}", _test_of(check))
            return
        changed = [
            name for name in cls.__dict__ if name in ("kind", "run_one") or (name.startswith("test_") and hasattr(super(cls, cls), name))
        ]
        if changed:
            raise TypeError(
                f"{cls.__name__} overrides '{changed[0]}' of the conformance suite: declare an expected failure under "
                f"[tool.quark.conformance.expected-failures] of pyproject.toml instead"
            )
        if not cls.subject:
            raise TypeError(f"{cls.__name__} has no subject: write subject = 'the registered name'")

    def run_one(self, check: Check) -> Result:
        """Find the subject among the plugins of this process, and run one check on it."""
        subject = find_subject(catalog(), self.kind, self.subject)
        pyproject = find_pyproject(subject.distribution, Path(inspect.getfile(type(self))).parent)
        own = attrs.evolve(subject, source_directory=None if pyproject is None else pyproject.parent)
        return run_check(own, check, expected_failures(pyproject).get(f"{subject.id}:{check.name}"))

    def test_every_check_is_there(self) -> None:
        """No check of the kind is missing or replaced."""
        missing = [
            check.name
            for check in checks_of(self.kind)
            if getattr(getattr(type(self), f"test_{check.name}", None), "check", None) is not check
        ]
        if missing:
            raise CheckFailedError(f"{type(self).__name__} lacks or replaces the checks {', '.join(missing)}")


def raise_for(result: Result) -> None:
    """Report a result in the way of pytest: return, warn, skip the test, mark it as an expected failure, or
    raise CheckFailedError.

    Raises:
        CheckFailedError: The check failed, or passed although pyproject.toml declares a failure.
        unittest.SkipTest: The check is not applicable.
    """
    __tracebackhide__ = True  # pytest: the message is enough
    if result.is_failure:
        raise CheckFailedError(f"{result.subject}: {result.message}\nwanted: {result.check.sentence}\n{result.details}".rstrip())
    if result.outcome == "not applicable":
        raise unittest.SkipTest(result.message)
    if result.outcome == "expected":
        import pytest  # pytest runs these classes, but importing this module must not need pytest

        pytest.xfail(result.message)
    if result.outcome == "advised":
        import warnings

        warnings.warn(f"{result.subject}: {result.message} (advisory: {result.check.sentence})", stacklevel=2)


def _test_of(check: Check) -> Callable[[Conformance], None]:
    def test(self: Conformance) -> None:
        __tracebackhide__ = True
        raise_for(self.run_one(check))

    test.__name__ = f"test_{check.name}"
    test.__doc__ = check.sentence
    test.check = check  # type: ignore[attr-defined]  # tells the suite's own test from a replacement
    return test


class FormatConformance(Conformance, kind="format"):
    """Every check of a number format."""


class ObserverConformance(Conformance, kind="observer"):
    """Every check of an observer."""


class SchemeConformance(Conformance, kind="scheme"):
    """Every check of a scheme."""


class RoundingConformance(Conformance, kind="rounding"):
    """Every check of a rounding."""


class TransformConformance(Conformance, kind="transform"):
    """Every check of a transform."""


class BlockTuningConformance(Conformance, kind="block_tuning"):
    """Every check of a tuning."""


class BranchConformance(Conformance, kind="branch"):
    """Every check of an algorithm that puts branches beside layers."""


class TemplateConformance(Conformance, kind="template"):
    """Every check of a template."""


class LayoutConformance(Conformance, kind="layout"):
    """Every check of a checkpoint layout: its exporter and its reader."""


class SelectorConformance(Conformance, kind="selector"):
    """Every check of a selector of schemes."""


class LayerTypeConformance(Conformance, kind="layer_type"):
    """Every check of a layer type."""


class DatasetConformance(Conformance, kind="dataset"):
    """Every check of a source of text."""


class MetricConformance(Conformance, kind="metric"):
    """Every check of a metric."""


class QuantModeConformance(Conformance, kind="quant_mode"):
    """Every check of a quantization mode."""


class GraphOpConformance(Conformance, kind="graph_op"):
    """Every check of an operator of FX graph mode."""


class DistributionConformance(Conformance, kind="distribution"):
    """Every check of a distribution as a whole; ``subject`` is the distribution's name."""
