"""Reports of conformance: text for a terminal, JSON, JUnit XML, and one line for a badge."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree

from quark.base.version import VERSION
from quark.plugins.api_version import API_VERSION
from quark_devkit.runner import OUTCOMES, Result, is_conformant

__all__ = ["as_json", "as_junit", "badge", "lines_of", "summary"]

_XML_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32)), "?")


def lines_of(results: Iterable[Result], *, verbose: bool = False) -> list[str]:
    """Return a line for each subject with its counts, and below it a line for each check that did not pass.

    Checks with the same failure message share a line.

    Args:
        results: The results, ordered by subject.
        verbose: Whether to add lines for checks that passed and for checks that are not applicable.
    """
    by_subject: dict[str, list[Result]] = {}
    for result in results:
        by_subject.setdefault(result.subject.id, []).append(result)
    lines: list[str] = []
    for own in by_subject.values():
        lines.append(f"{'FAILED' if any(r.is_failure for r in own) else 'ok':6}  {own[0].subject}: {_counts(own)}")
        alike: dict[str, list[Result]] = {}
        for result in own:
            # A record that cannot be loaded fails every check with the same message, which is printed once.
            is_said_once = not verbose and result.outcome in ("failed", "advised")
            alike.setdefault(result.message if is_said_once else f"{result.outcome} {result.check.name}", []).append(result)
        for results_alike in alike.values():
            first, count = min(results_alike, key=lambda result: _shown_order(result.outcome)), len(results_alike)
            if verbose or first.outcome not in ("passed", "not applicable"):
                message = f": {_one_line(first.message)}" if first.message else ""
                lines.append(f"        {first.outcome} {first.check.name if count == 1 else f'{count} checks'}{message}")
                if count == 1 and first.outcome in ("failed", "unexpected", "advised"):
                    lines.append(f"          wanted: {first.check.sentence}")
    return lines


def summary(results: Sequence[Result]) -> str:
    """Return one line on all results: ``"conformant: 23 passed, 2 not applicable, in 3 subjects"``."""
    answer = "conformant" if is_conformant(results) else "not conformant"
    count = len({result.subject.id for result in results})
    return f"{answer}: {_counts(results)}, in {count} subject{'s' if count != 1 else ''}"


def badge(distribution: str, results: Sequence[Result]) -> str:
    """Return one line for a badge: ``"acme-quant 0.1.0: conformant with quark plugin API 1, 57 checks"``."""
    counts = Counter(result.outcome for result in results)
    version = results[0].subject.version if results else ""
    answer = "conformant" if is_conformant(results) else "not conformant"
    declared = f", {counts['expected']} expected failures" if counts["expected"] else ""
    return (
        f"{distribution} {version}".rstrip() + f": {answer} with quark plugin API {API_VERSION}, {counts['passed']} checks passed{declared}"
    )


def as_json(distribution: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return the report as JSON values: whether the distribution is conformant, counts, and every result with
    the check's requirement."""
    return {
        "distribution": distribution,
        "version": results[0].subject.version if results else "",
        "quark_core": VERSION,
        "plugin_api": API_VERSION,
        "conformant": is_conformant(results),
        "counts": {outcome: count for outcome in OUTCOMES if (count := sum(r.outcome == outcome for r in results))},
        "results": [
            {
                "id": result.id,
                "kind": result.subject.kind,
                "name": result.subject.name,
                "check": result.check.name,
                "requirement": result.check.sentence,
                "level": result.check.level,
                "outcome": result.outcome,
                "message": result.message,
                "details": result.details,
                "seconds": round(result.seconds, 3),
            }
            for result in results
        ],
    }


def as_junit(distribution: str, results: Sequence[Result]) -> str:
    """Return JUnit XML with a test case for each result. Expected failures count as skipped."""
    failures = sum(result.is_failure for result in results)
    skipped = sum(result.outcome in ("expected", "not applicable") for result in results)
    suite = ElementTree.Element(
        "testsuite",
        name=f"quark conformance of {distribution}",
        tests=str(len(results)),
        failures=str(failures),
        skipped=str(skipped),
        time=f"{sum(r.seconds for r in results):.3f}",
    )
    for result in results:
        case = ElementTree.SubElement(suite, "testcase", classname=result.subject.id, name=result.check.name, time=f"{result.seconds:.3f}")
        message = result.message.translate(_XML_CONTROLS)
        if result.is_failure:
            ElementTree.SubElement(case, "failure", message=message).text = result.details.translate(_XML_CONTROLS)
        elif result.outcome in ("expected", "not applicable"):
            ElementTree.SubElement(case, "skipped", message=message)
        elif result.outcome == "advised":
            ElementTree.SubElement(case, "system-out").text = f"advisory: {message}"
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _counts(results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in sorted(OUTCOMES, key=_shown_order) if counts[outcome]) or "no checks"


def _shown_order(outcome: str) -> int:
    return ["failed", "unexpected", "advised", "expected", "passed", "not applicable"].index(outcome)


def _one_line(text: str) -> str:
    return json.dumps(" ".join(text.split()), ensure_ascii=False)[1:-1].replace('\\"', '"').replace("\\\\", "\\")
