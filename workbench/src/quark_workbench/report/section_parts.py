"""Parts that sections of the page have in common: heading with lead, entry of a legend, numbers that may be missing."""

from __future__ import annotations

from quark_workbench.report.svg import Markup, tag

__all__ = ["figure_text", "heading", "legend", "legend_key"]


def heading(key: str, title: str, lead: str) -> list[Markup]:
    """Return the heading of a section, and the sentences below it; ``key`` is the id of the section."""
    return [tag("h2", title, id=f"{key}-heading"), tag("p", lead, class_="lead")]


def legend(*keys: Markup) -> Markup:
    """Return a legend of entries from `legend_key`."""
    return tag("ul", *keys, class_="legend")


def legend_key(class_: str, name: str, *, round_: bool = False) -> Markup:
    """Return an entry of a legend: a mark of the class of what it stands for, and its name."""
    shape = tag("circle", cx=7, cy=7, r=5, class_=class_) if round_ else tag("rect", width=14, height=14, rx=3, class_=class_)
    return tag("li", tag("svg", shape, viewBox="0 0 14 14", class_="plot", aria_hidden="true"), name)


def figure_text(value: float | None, form: str) -> str:
    """Return a number in a format; a dash where it is None."""
    return "–" if value is None else format(value, form)
