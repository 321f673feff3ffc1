"""List modules without their public names in ``__all__``; with ``--write``, add them.

    python -m tools.public_names            # lists missing and wrong ``__all__``; exit status 1 for any
    python -m tools.public_names --write    # adds ``__all__`` with all names without underscore

Shorten the added ``__all__`` by hand, then run ``ruff check --fix`` and ``ruff format``. Public names are
functions, classes and constants at the top of a module, and explicit re-exports, ``from a import b as b``. A
module without such names needs no ``__all__``. In the core, only modules with an API page are public. Modules
in `WITHOUT_PUBLIC_NAMES` need no ``__all__``: the catalogue finds checks by their type, and records reference
architectures.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.docs.api import PUBLIC

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_PUBLIC_NAMES = (
    "devkit/src/quark_devkit/checks",
    "plugins/quark_templates/src/quark_templates",
)


def modules(root: Path = ROOT) -> list[Path]:
    """Return all modules of the distributions, except private modules and the modules in
    `WITHOUT_PUBLIC_NAMES`."""
    folders = [*sorted(root.glob("plugins/*")), root / "tiny_model", root / "devkit", *sorted(root.glob("examples/*"))]
    paths = [*public_modules_of_core(root), *(path for folder in folders for path in sorted((folder / "src").rglob("*.py")))]
    public = [path for path in paths if not path.stem.startswith("_") or path.stem == "__init__"]
    return [path for path in public if not any(path.is_relative_to(root / folder) for folder in WITHOUT_PUBLIC_NAMES)]


def public_modules_of_core(root: Path = ROOT) -> list[Path]:
    """Return the modules of core that have an API page."""
    places = [root / "core/src" / name.replace(".", "/") for name in PUBLIC if name.partition(".")[0] == "quark"]
    files = [place / "__init__.py" if place.is_dir() else place.with_suffix(".py") for place in places]
    return [path for path in files if path.exists()]


def public_names(tree: ast.Module) -> list[str]:
    """Return the names without an underscore that a module defines or explicitly re-exports, in order."""
    names = [name for statement in tree.body for name in _bound(statement)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def _bound(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
            yield from (alias.name for alias in aliases if alias.asname == alias.name)
        case ast.If() | ast.Try():
            yield from (name for inner in statement.body for name in _bound(inner))


def declared(tree: ast.Module) -> list[str] | None:
    """Return the names in ``__all__``. Return None if ``__all__`` is missing, and an empty list if it is
    computed."""
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(statement, "value", None)
            constants = value.elts if isinstance(value, ast.List | ast.Tuple) else []
            return [element.value for element in constants if isinstance(element, ast.Constant)]
    return None


def defects(path: Path) -> list[str]:
    """Return the defects in the ``__all__`` of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = declared(tree)
    if names is None:
        return ["has no __all__"] if public_names(tree) else []
    if any(isinstance(s, ast.FunctionDef) and s.name == "__getattr__" for s in tree.body):
        return []  # names loaded on access
    imported = {alias.asname or alias.name for s in ast.walk(tree) if isinstance(s, ast.ImportFrom) for alias in s.names}
    there = {*imported, *(name for statement in tree.body for name in _bound(statement))}
    return [f"__all__ names {name}, which the module does not have" for name in names if name not in there]


def with_all(source: str) -> str:
    """Return the source of a module with ``__all__`` after its imports."""
    tree = ast.parse(source)
    header = 0
    for statement in tree.body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_typing = isinstance(statement, ast.If) and isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
        if not (is_docstring or is_typing or isinstance(statement, ast.Import | ast.ImportFrom)):
            break
        header = statement.end_lineno or header
    lines = source.splitlines(keepends=True)
    names = ", ".join(f'"{name}"' for name in public_names(tree))
    return "".join([*lines[:header], f"\n__all__ = [{names}]\n", *lines[header:]])


def main() -> int:
    """Report missing and wrong ``__all__``, or write them."""
    parser = argparse.ArgumentParser(prog="python -m tools.public_names", description="Modules without __all__.")
    parser.add_argument("--write", action="store_true", help="add missing __all__")
    write = parser.parse_args().write
    found = {path: lines for path in modules() if (lines := defects(path))}
    for path, lines in found.items():
        if write and lines == ["has no __all__"]:
            path.write_text(with_all(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            print(f"{path.relative_to(ROOT)}: {'; '.join(lines)}")
    return int(bool(found) and not write)


if __name__ == "__main__":
    sys.exit(main())
