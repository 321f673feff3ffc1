"""The four reports say the same."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import attrs

from quark.plugins.api_version import API_VERSION
from quark.plugins.catalog import catalog
from quark_devkit import report
from quark_devkit.check import Check
from quark_devkit.runner import Result
from quark_devkit.subject import Subject

CHECK = Check("distribution", "is_right", "It is right.", lambda subject: None)
SUBJECT = Subject("distribution", "acme-quant", "acme-quant", "0.1.0", None, catalog())


def result(outcome: str, message: str = "") -> Result:
    return Result(SUBJECT, CHECK, outcome, message, 0.5, "a traceback \x1b[31m" if outcome == "failed" else "")


MIXED = [result("passed"), result("failed", "is\nwrong \x1b[31m"), result("expected", "a reason"), result("not applicable", "has none")]


def test_lines_say_what_failed_and_what_is_wanted() -> None:
    lines = report.lines_of(MIXED)
    assert lines == [
        "FAILED  distribution 'acme-quant' of acme-quant 0.1.0: 1 failed, 1 expected, 1 passed, 1 not applicable",
        "        failed is_right: is wrong \\u001b[31m",
        "          wanted: It is right.",
        "        expected is_right: a reason",
    ]
    assert len(report.lines_of(MIXED, verbose=True)) == 6
    assert report.lines_of([result("passed")]) == ["ok      distribution 'acme-quant' of acme-quant 0.1.0: 1 passed"]


def test_what_fails_many_checks_in_the_same_words_is_said_once() -> None:
    others = [attrs.evolve(CHECK, name=name) for name in ("is_fast", "is_small")]
    lost = [Result(SUBJECT, check, "failed", "cannot be loaded") for check in (CHECK, *others)]
    lines = report.lines_of([*lost, result("failed", "is wrong")])
    assert lines[1:] == ["        failed 3 checks: cannot be loaded", "        failed is_right: is wrong", "          wanted: It is right."]
    assert "        failed is_fast: cannot be loaded" in report.lines_of(lost, verbose=True)
    assert len(report.as_json("acme-quant", lost)["results"]) == 3


def test_the_summary_and_the_badge_say_whether_it_is_conformant() -> None:
    assert report.summary(MIXED) == "not conformant: 1 failed, 1 expected, 1 passed, 1 not applicable, in 1 subject"
    api = f"quark plugin API {API_VERSION}"
    badges = [report.badge("acme-quant", results) for results in (MIXED, [result("passed")])]
    assert badges[0] == f"acme-quant 0.1.0: not conformant with {api}, 1 checks passed, 1 expected failures"
    assert badges[1] == f"acme-quant 0.1.0: conformant with {api}, 1 checks passed"


def test_json_has_every_result() -> None:
    data = json.loads(json.dumps(report.as_json("acme-quant", MIXED)))
    assert (data["conformant"], data["counts"]) == (False, {"passed": 1, "failed": 1, "expected": 1, "not applicable": 1})
    assert [r["outcome"] for r in data["results"]] == ["passed", "failed", "expected", "not applicable"]
    assert data["results"][1]["id"] == "distribution:acme-quant:is_right"


def test_junit_can_be_parsed_and_counts_the_same() -> None:
    suite = ElementTree.fromstring(report.as_junit("acme-quant", MIXED))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "2")
    failure = suite.findall("testcase")[1].find("failure")
    assert failure is not None
    assert failure.get("message", "").split() == ["is", "wrong", "?[31m"]


def test_junit_keeps_advice_and_says_which_encoding_it_has() -> None:
    text = report.as_junit("acme-quant", [result("advised", "say more"), result("passed")])
    assert text.startswith("<?xml ")
    advised, passed = ElementTree.fromstring(text).findall("testcase")
    assert advised.findtext("system-out") == "advisory: say more"
    assert list(passed) == []
