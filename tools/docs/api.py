"""Pages of the Python API: a page for each package or module of `PUBLIC`, with the names of its ``__all__``.

If another page describes an object, such as a protocol for plugins, the API page only links to it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import posixpath
import re

import attrs

from tools.docs.sections import ROOT

__all__ = ["PUBLIC", "Page", "pages", "targets"]

PUBLIC = (
    "quark.torch",
    "quark.plugins",
    "quark.config.model",
    "quark.config.layer",
    "quark.config.tensor",
    "quark.config.algorithm",
    "quark.config.architecture",
    "quark.config.enums",
    "quark.config.templates",
    "quark.numbers",
    "quark.models.layers",
    "quark.checkpoint",
    "quark.algorithms",
    "quark.runs",
    "quark_workbench.evaluate",
    "quark_workbench.template_file",
    "quark_devkit",
    "quark_tiny_model",
    "quark.errors",
)
_FOLDER = "reference/api"


@attrs.frozen
class Page:
    """A page of the API.

    Attributes:
        title: Name of the package.
        path: Path of the page below ``docs/``.
        markdown: Source of the page.
    """

    title: str
    path: str
    markdown: str


@functools.cache
def pages() -> tuple[Page, ...]:
    """Return a page for each package."""
    return tuple(Page(package, f"{_FOLDER}/{package}.md", _markdown(package)) for package in PUBLIC)


@functools.cache
def targets() -> dict[str, str]:
    """Return, for each name that a docstring may use (short or full), the identifier to which the name is
    linked."""
    found: dict[str, str] = {}
    for path in _described().values():
        package, _, name = path.rpartition(".")
        value = _value(package, name)
        found[path] = path
        if inspect.isclass(value):
            found[name] = path
        if inspect.isclass(value) or inspect.isfunction(value):
            found[f"{value.__module__}.{value.__name__}"] = path
    return found


@functools.cache
def _described() -> dict[object, str]:
    """Return, for each public object, the identifier under which it is described.

    If several packages export an object, the identifier names the package that defines the object.
    """
    found: dict[object, str] = {}
    for package in PUBLIC:
        for name in _public(package):
            if _key(package, name) not in found or getattr(_value(package, name), "__module__", package).startswith(package):
                found[_key(package, name)] = f"{package}.{name}"
    return found


def _value(package: str, name: str) -> object:
    return getattr(importlib.import_module(package), name)


def _key(package: str, name: str) -> object:
    """Return a key of an object.

    All names of one class or function have the same key. Every other name has its own key.
    """
    value = _value(package, name)
    return id(value) if inspect.isclass(value) or inspect.isfunction(value) else (package, name)


def _public(package: str) -> tuple[str, ...]:
    return tuple(importlib.import_module(package).__all__)


@functools.cache
def _written_by_hand() -> dict[str, str]:
    """Return the page of each identifier that a page in ``docs/`` describes with ``:::``."""
    return {
        identifier: path.relative_to(ROOT / "docs").as_posix()
        for path in sorted((ROOT / "docs").rglob("*.md"))
        for identifier in re.findall(r"^::: (\S+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }


def _markdown(package: str) -> str:
    summary = (inspect.getdoc(importlib.import_module(package)) or "").partition("\n\n")[0].replace("``", "`")
    here, elsewhere = [], []
    for name in _public(package):
        path = _described()[_key(package, name)]
        if path == f"{package}.{name}" and path not in _written_by_hand():
            here.append(f"::: {path}")
        else:
            page = _written_by_hand().get(path, f"{_FOLDER}/{path.rpartition('.')[0]}.md")
            elsewhere.append(f"[`{name}`]({posixpath.relpath(page, _FOLDER)}#{path})")
    also = f"Described elsewhere: {', '.join(elsewhere)}." if elsewhere else ""
    return "\n\n".join(filter(None, [f"# {package}", summary, also, *here]))
