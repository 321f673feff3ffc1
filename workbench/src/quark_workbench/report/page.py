"""The report as one HTML page, without scripts and external files; light or dark as the reader's system."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from quark_workbench.report.markup import Markup, joined, tag
from quark_workbench.report.sections import big_numbers, sections
from quark_workbench.report.units import amount

__all__ = ["page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Mapping[str, Any]) -> str:
    """Return the page of a report.

    Args:
        report: The contents, as `quark_workbench.report.contents.contents_of` makes them or a JSON file has
            them. Nothing in them is trusted: names and messages are escaped.
    """
    model, settings = report["model"], report["settings"]
    title = f"{model['name']}: quantization report"
    algorithms = [str(a.get("name", "")) for a in settings["algorithms"]]
    made = ", ".join(filter(None, [settings["scheme"], *algorithms])) or "own configuration"
    subtitle = (
        f"{model['class']}: {amount(model['parameters'])} parameters, {len(model['blocks'])} blocks. "
        f"Written by quark {report['versions']['quark']} on {report['created'][:10]} at {report['created'][11:16]} UTC."
    )
    parts = sections(report)
    links = [tag("li", tag("a", name, href=f"#{key}")) for key, name, _ in parts]
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        tag("title", title),
        tag("style", Markup((files("quark_workbench.report") / "style.css").read_text(encoding="utf-8"))),
    )
    header = tag(
        "header",
        tag("p", "Quantization report", class_="eyebrow"),
        tag("h1", f"{model['name']} in {made}"),
        tag(
            "p",
            subtitle,
            class_="subtitle",
        ),
        big_numbers(report),
        tag("nav", tag("ul", joined(links)), aria_label="Sections"),
    )
    body = tag(
        "body",
        tag("a", "Skip to the findings", href="#flags", class_="skip"),
        header,
        tag("main", *(content for _, _, content in parts)),
        tag(
            "footer", tag("p", f"Format {report['format']} version {report['format_version']}. The same numbers are in quark_report.json.")
        ),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"
