"""A test class runs every check of its kind, and cannot leave one out."""

from __future__ import annotations

import unittest
import warnings

import pytest

from quark.plugins.catalog import catalog
from quark_devkit import ObserverConformance, all_checks
from quark_devkit.check import CheckFailedError
from quark_devkit.classes import raise_for
from quark_devkit.runner import Result, run_check
from quark_devkit.subject import find_subject


class TestPercentile(ObserverConformance):
    subject = "per_tensor_percentile"


OWN = [check for check in all_checks().values() if check.kind == "observer"]


def test_there_is_a_test_for_each_check() -> None:
    tests = {name for name in dir(TestPercentile) if name.startswith("test_")}
    assert tests == {"test_every_check_is_there", *(f"test_{check.name}" for check in OWN)}
    assert TestPercentile.test_serves_a_spec.__doc__ == all_checks()["observer:serves_a_spec"].sentence  # type: ignore[attr-defined]


def test_a_check_cannot_be_overridden() -> None:
    with pytest.raises(TypeError, match="overrides 'test_serves_a_spec' of the conformance suite: declare an expected failure"):
        type("TestOver", (ObserverConformance,), {"subject": "min_max", "test_serves_a_spec": lambda self: None})
    with pytest.raises(TypeError, match="overrides 'test_serves_a_spec'"):
        type("TestNone", (TestPercentile,), {"test_serves_a_spec": None})
    with pytest.raises(TypeError, match="overrides 'kind'"):
        type("TestKind", (ObserverConformance,), {"subject": "min_max", "kind": "format"})


def test_a_check_that_is_taken_away_later_is_missed() -> None:
    class TestLater(ObserverConformance):
        subject = "min_max"

    TestLater().test_every_check_is_there()
    TestLater.test_serves_a_spec = lambda self: None  # type: ignore[attr-defined]
    with pytest.raises(CheckFailedError, match="lacks or replaces the checks serves_a_spec"):
        TestLater().test_every_check_is_there()


def test_a_class_without_a_subject_is_refused() -> None:
    with pytest.raises(TypeError, match="TestNobody has no subject: write subject"):
        type("TestNobody", (ObserverConformance,), {})


def test_what_an_outcome_means_to_a_test() -> None:
    subject = find_subject(catalog(), "observer", "min_max")

    def result(outcome: str) -> Result:
        return Result(subject, OWN[0], outcome, "the message")

    raise_for(result("passed"))
    for outcome in ("failed", "unexpected"):
        with pytest.raises(CheckFailedError, match=r"observer 'min_max' of quark-schemes .*: the message\nwanted: At least"):
            raise_for(result(outcome))
    with pytest.raises(unittest.SkipTest, match="the message"):
        raise_for(result("not applicable"))
    with pytest.raises(pytest.xfail.Exception, match="the message"):
        raise_for(result("expected"))
    with pytest.warns(UserWarning, match="the message .advisory"):
        raise_for(result("advised"))


def test_the_subject_of_a_check_says_who_brings_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        subject = find_subject(catalog(), "observer", "min_max")
    assert (subject.id, subject.distribution, subject.lookup_name) == ("observer:min_max", "quark-schemes", "min_max")
    assert run_check(subject, OWN[0]).outcome == "passed"
