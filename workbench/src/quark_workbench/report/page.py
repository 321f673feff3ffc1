"""The report as one HTML page without scripts and external files.

The page is light or dark, as the reader's system is. The page and each of its sections are Jinja templates in
the folder ``templates``. This module supplies the functions that the templates call.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from quark.base.names import folded
from quark.base.scalars import decibels
from quark_workbench.report import heat_map, plots, selection_plots, units
from quark_workbench.report.markup import style_sheet

__all__ = ["page"]

MOST_ROWS = 300
"""Rows of a table on the page; the JSON file has all of them."""

_SECTIONS = {
    "flags": "Findings",
    "evaluation": "Evaluation",
    "layers": "Layers",
    "selection": "Choice of schemes",
    "gain": "Gain of the algorithm",
    "depth": "Depth",
    "transforms": "Transforms",
    "tunings": "Tuning",
    "worst": "Worst layers",
    "experts": "Experts",
    "sizes": "Sizes",
    "time": "Time",
    "settings": "Settings and files",
}
"""Link title by section, in reading order; ``templates/sections/`` has a template for each section."""


def page(report: Mapping[str, Any]) -> str:
    """Return the page of a report.

    Args:
        report: The contents of the report. They may come from a JSON file that is not trusted, so all names
            and messages are escaped.
    """
    templates = _templates()
    contents = {key: templates.get_template(f"sections/{key}.html.jinja").render(report=report).strip() for key in _SECTIONS}
    sections = [(key, title, Markup(contents[key])) for key, title in _SECTIONS.items() if contents[key]]
    return templates.get_template("page.html.jinja").render(report=report, sections=sections)


@cache
def _templates() -> Environment:
    """Return the templates with all functions and filters that they use."""
    loader = PackageLoader("quark_workbench.report")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    for module in (plots, heat_map, selection_plots):
        environment.globals.update({name: getattr(module, name) for name in module.__all__})
    environment.globals.update(MOST_ROWS=MOST_ROWS, folded=folded, style_sheet=style_sheet, decibel_text=units.decibel_text)
    environment.filters.update({name: getattr(units, name) for name in units.__all__})
    environment.filters.update(json=partial(json.dumps, ensure_ascii=False), median=statistics.median)
    environment.filters["error_decibels"] = partial(decibels, 1.0)
    return environment
