"""The names of the plugin API with their signatures, and the changes of signatures that break a plugin.

The API has every object that a page of ``docs/plugins`` documents (``:::``). It also has every name that
these pages, the templates of ``quark new-plugin`` and the example distribution import from quark. For a
class, the API includes the constructor and the public members.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from enum import EnumType
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_origin

from quark.plugins.api_version import API_VERSION

__all__ = ["Signature", "breaks", "current", "imports_of", "path_of", "recorded"]

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("quark", "quark_devkit", "quark_tiny_model", "quark_workbench")
Signature = str | None
"""Parameters: ``"x, y="`` with a default of y, ``"*z"`` for keyword only; None for other objects."""


def path_of(version: int) -> Path:
    """Return the file of a version."""
    return Path(__file__).with_name(f"{version}.json")


def recorded(version: int) -> dict[str, Signature]:
    """Return the recorded names of a version. If there is no file, the result is empty."""
    file = path_of(version)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def current() -> dict[str, Signature]:
    """Return the signatures of public names. The keys have the form ``"module.Name"`` or
    ``"module.Name.member"``."""
    found: dict[str, Signature] = {}
    for module, name in sorted(_shown() | _recorded_objects()):
        value = getattr(import_module(module), name, None)
        if value is None:
            continue
        found[f"{module}.{name}"] = _signature(value)
        if inspect.isclass(value):
            found |= {f"{module}.{name}.{member}": _signature(inner) for member, inner in _members(value)}
    return found


def breaks(before: Mapping[str, Signature], now: Mapping[str, Signature]) -> list[str]:
    """Return a sentence for each change that breaks a plugin written for ``before``: a lost name, or a name
    that cannot be called as before."""
    broken = []
    for name, old in before.items():
        if name not in now:
            broken.append(f"{name} is gone: leave a deprecated alias, or raise API_VERSION and add a row to docs/plugins/compatibility.md")
        elif old is not None and (why := _unlike(old, now[name])):
            broken.append(f"{name} {why}: keep the old signature, or raise API_VERSION and add a row to docs/plugins/compatibility.md")
    return broken


def imports_of(code: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import from quark."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.partition(".")[0] in _PACKAGES:
            yield from ((node.module, alias.name) for alias in node.names)


def _shown() -> set[tuple[str, str]]:
    """Return the module and the name of each API name that pages, templates and the example distribution
    use."""
    shown = {("quark.plugins", "QuarkHooks")}
    for page in (ROOT / "docs/plugins").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        shown |= {(module, name) for module, name in re.findall(r"^::: ([\w.]+)\.(\w+)$", text, flags=re.MULTILINE)}
        for code in re.findall(r"^```python[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            shown |= set(imports_of(code))
    for template in (ROOT / "devkit/src/quark_devkit/new_plugin/templates").rglob("*.py.template"):
        lines = template.read_text(encoding="utf-8")
        for statement in re.findall(r"^ *from (quark[\w.]*) import (\([^)]*\)|[^\n]*)$", lines, flags=re.MULTILINE):
            shown |= {(statement[0], name.strip()) for name in statement[1].strip("()").split(",") if name.strip()}
    for source in (ROOT / "examples/acme_quant/src").rglob("*.py"):
        shown |= set(imports_of(source.read_text(encoding="utf-8")))
    return shown


def _recorded_objects() -> set[tuple[str, str]]:
    """Return the recorded names of this version, without members. They stay public even without a page."""
    names = (name for name in recorded(API_VERSION) if _is_module(name.rpartition(".")[0]))
    return {(module, name) for module, _, name in (text.rpartition(".") for text in names)}


def _is_module(module: str) -> bool:
    """Return whether a name is a module."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public attributes of a class and of its base classes in quark. Conformance checks are left
    out."""
    names = {name for base in kind.__mro__ if base.__module__.partition(".")[0] in _PACKAGES for name in (*vars(base), *_annotated(base))}
    yield from ((name, getattr(kind, name, None)) for name in sorted(names) if not name.startswith(("_", "test_")))


def _annotated(base: type) -> list[str]:
    return list(inspect.get_annotations(base))


def _signature(value: Any) -> Signature:
    if not callable(value) or get_origin(value) is not None:  # an alias such as dict[str, float] is not for calls
        return None
    if isinstance(value, EnumType):
        return "value"  # `inspect` of an enumeration differs between versions of Python
    try:
        parameters = inspect.signature(value).parameters.values()
    except (ValueError, TypeError):
        return None
    stars = {inspect.Parameter.KEYWORD_ONLY: "*", inspect.Parameter.VAR_POSITIONAL: "*args:", inspect.Parameter.VAR_KEYWORD: "**"}
    return ", ".join(f"{stars.get(p.kind, '')}{p.name}{'' if p.default is p.empty else '='}" for p in parameters)


def _unlike(before: str, now: Signature) -> str | None:
    """Return why a call with the old parameters may fail with the new ones; None if every call fits."""
    if now is None:
        return "can no longer be called"
    old, new = ([part for part in text.split(", ") if part] for text in (before, now))
    names = [parameter.lstrip("*").rstrip("=") for parameter in new]
    if lost := [parameter for parameter in old if parameter.lstrip("*").rstrip("=") not in names]:
        return f"has lost the parameter '{lost[0].lstrip('*').rstrip('=')}'"
    if bound := [p for p in old if p.endswith("=") and p not in new and p.lstrip("*") not in new]:
        return f"asks for the parameter '{bound[0].lstrip('*').rstrip('=')}', which had a default"
    known = {parameter.lstrip("*").rstrip("=") for parameter in old}
    needed = [p for p in new if not p.endswith("=") and not p.startswith(("*args:", "**"))]
    if asked := [p for p in needed if p.lstrip("*") not in known]:
        return f"asks for a new parameter '{asked[0].lstrip('*')}'"
    positional = [p.rstrip("=") for p in old if not p.startswith("*")]
    if [p.rstrip("=") for p in new if not p.startswith("*")][: len(positional)] != positional:
        return "takes its parameters in another order"
    return None
