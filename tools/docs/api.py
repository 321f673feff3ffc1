"""Pages of the Python API: one for each package or module of `PUBLIC`, with the names of its ``__all__``.

What another page of the documentation describes, such as a protocol for plugins, is linked and not repeated.
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
    "quark.templates",
    "quark.quantizers",
    "quark.modules",
    "quark.checkpoint",
    "quark.algorithms",
    "quark.runs",
    "quark.evaluate",
    "quark.testing",
    "quark.testing.tiny",
    "quark.errors",
)
_FOLDER = "reference/api"


@attrs.frozen
class Page:
    """A page of the API.

    Attributes:
        title: Name of the package.
        path: Below ``docs/``.
        markdown: Its source.
    """

    title: str
    path: str
    markdown: str


@functools.cache
def pages() -> tuple[Page, ...]:
    """Return a page for each package that has public names."""
    made = []
    written = _written_by_hand()
    for package in PUBLIC:
        names = _public(package)
        if names:
            made.append(Page(package, f"{_FOLDER}/{package}.md", _markdown(package, names, written)))
    return tuple(made)


@functools.cache
def targets() -> dict[str, str]:
    """Return what a name in a docstring links to: the identifier of the one place that describes it, by its name and by its full names."""
    described = [f"{package}.{name}" for package, names in _owned().items() for name in names]
    found: dict[str, str] = {}
    for path in described:
        package, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(package), name)
        found[path] = path
        if isinstance(value, type):
            found[name] = path
        if inspect.isclass(value) or inspect.isfunction(value):
            found[f"{value.__module__}.{value.__name__}"] = path
    return found


@functools.cache
def _owned() -> dict[str, tuple[str, ...]]:
    """Return the names that each package describes: of an object that several packages offer, the package nearest to its definition."""
    owners: dict[object, str] = {}
    for package in PUBLIC:
        for name in _public(package):
            value = getattr(importlib.import_module(package), name)
            if _same(package, name) not in owners or getattr(value, "__module__", package).startswith(package):
                owners[_same(package, name)] = package
    return {package: tuple(name for name in _public(package) if owners[_same(package, name)] == package) for package in PUBLIC}


def _same(package: str, name: str) -> object:
    """Return what is equal for two names of one class or function; other values, such as numbers, are described wherever they are named."""
    value = getattr(importlib.import_module(package), name)
    return id(value) if inspect.isclass(value) or inspect.isfunction(value) else (package, name)


def _public(package: str) -> tuple[str, ...]:
    module = importlib.import_module(package)
    return tuple(name for name in getattr(module, "__all__", ()) if not name.startswith("__"))


def _written_by_hand() -> dict[str, str]:
    """Return the page of each identifier that a page of ``docs/`` describes with ``:::``."""
    return {
        identifier: path.relative_to(ROOT / "docs").as_posix()
        for path in sorted((ROOT / "docs").rglob("*.md"))
        for identifier in re.findall(r"^::: (\S+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }


def _markdown(package: str, names: tuple[str, ...], written: dict[str, str]) -> str:
    owned = _owned()[package]
    summary = (inspect.getdoc(importlib.import_module(package)) or "").partition("\n\n")[0]
    elsewhere = [_link(package, name, written) for name in names if name not in owned or f"{package}.{name}" in written]
    here = [f"::: {package}.{name}" for name in owned if f"{package}.{name}" not in written]
    also = f"Described elsewhere: {', '.join(elsewhere)}." if elsewhere else ""
    return "\n\n".join(filter(None, [f"# {package}", summary.replace("``", "`"), also, *here]))


def _link(package: str, name: str, written: dict[str, str]) -> str:
    """Return a link to the page that describes a name."""
    for owner, names in _owned().items():
        for own in names:
            if _same(owner, own) == _same(package, name):
                path = f"{owner}.{own}"
                page = posixpath.relpath(written.get(path, f"{_FOLDER}/{owner}.md"), _FOLDER)
                return f"[`{name}`]({page}#{path})"
    return f"`{name}`"
