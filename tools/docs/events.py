"""The events of a run, from the docstrings of their classes: a section for each event and its fields."""

from __future__ import annotations

import inspect
import re

import attrs

from quark.plugins.events import EVENTS, Event
from tools.docs.manual import as_markdown
from tools.docs.tables import cell, code, markdown_table

__all__ = ["events"]

_COMMON = ("task", "elapsed")


def events() -> str:
    """Return the attributes of every event, then a section for each kind of event."""
    common = _fields_of(Event)
    rows = [["`event`", "its name"], ["`version`", "version of these fields"], *([code(name), _meaning(common[name])] for name in _COMMON)]
    sections = [markdown_table(["field of every event", "meaning"], rows)]
    for kind in EVENTS:
        about, fields = as_markdown((inspect.getdoc(kind) or "").partition("\n\n")[0]), _fields_of(kind)
        own = [field.name for field in attrs.fields(kind) if field.name not in _COMMON]
        parts = [f"### {kind.name}", f"`quark.plugins.{kind.__name__}`: {about}"]
        parts += [markdown_table(["field", "meaning"], [[code(name), _meaning(fields[name])] for name in own])] if own else []
        sections += parts
    return "\n\n".join(sections)


def _fields_of(kind: type[Event]) -> dict[str, str]:
    """Return the description of each attribute in the docstring of a class."""
    text = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    return {match[1]: " ".join(match[2].split()) for match in re.finditer(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", text, flags=re.M | re.S)}


def _meaning(text: str) -> str:
    parts = re.split(r"`+(.+?)`+", text)
    return "".join(code(part) if i % 2 else cell(f"|{part}|")[2:-2] for i, part in enumerate(parts))
