"""Make stub files for AMD Quark's public modules, which have no source files, for type checkers.

    python -m tools.public_stubs             # lists stub files that are out of date; exit status 1 for any
    python -m tools.public_stubs --write     # writes these files

The stubs mirror `quark_amd.finder`: their names come from `quark_amd.import_paths` and from the records of
this project's plugins. Names of other plugins, and names made at import, are `Any`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from importlib.util import find_spec
from pathlib import Path

from quark.plugins.catalog import catalog
from quark.plugins.registries import BUILT_IN
from quark_amd.import_paths import IN_EXAMPLES, NAMES, WITH_NAMES_OF_PLUGINS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = "plugins/quark_amd/src"
PACKAGE = "quark-stubs"
"""The partial stub package (PEP 561), where type checkers first look for modules of `quark`."""
ROOT_MODULE = "quark.torch"
SHARED = "quark.torch._names_of_plugins"
"""A module that exists only as a stub: the names in each module of `WITH_NAMES_OF_PLUGINS`."""
HEADER = "# Written by tools/public_stubs.py: run it again after a change of names; do not edit."


def references() -> dict[str, dict[str, str]]:
    """Return the names of each public module in `ROOT_MODULE`, each with its reference
    ``"module:attribute"``."""
    claims = [entry for registry in catalog().registries.values() for entry in registry.claims()]
    exports = {
        name: f"{reference.module}:{reference.attribute}"
        for entry in claims
        if entry.source.distribution in BUILT_IN
        for name, reference in entry.record.exports.items()
    }
    by_module: dict[str, dict[str, str]] = {module: dict(names) for module, names in NAMES.items()}
    by_module[SHARED] = {name: reference for name, reference in exports.items() if ":" not in name}
    for key, reference in exports.items():
        module, colon, name = key.partition(":")
        if colon:
            by_module.setdefault(module, {})[name] = reference
    for module in IN_EXAMPLES:
        by_module.setdefault(module, {})
    for module in list(by_module):
        for count in range(1, module.count(".")):
            by_module.setdefault(module.rsplit(".", count)[0], {})
    return {module: names for module, names in sorted(by_module.items()) if f"{module}.".startswith(f"{ROOT_MODULE}.")}


def is_written(module: str, name: str) -> bool:
    """Return whether a name occurs in the source of a module. Names that are made at import do not occur
    there."""
    spec = find_spec(module)
    tree = ast.parse(Path((spec and spec.origin) or "").read_text(encoding="utf-8"))
    return any(name in (getattr(node, "name", None), getattr(node, "asname", None), getattr(node, "id", None)) for node in ast.walk(tree))


def stub(module: str, names: dict[str, str]) -> str:
    """Return the stub of one module. ``names`` maps each name to its reference."""
    made = sorted(f"{name}: Any" for name, reference in names.items() if not is_written(*reference.split(":")))
    split = {name: reference.split(":") for name, reference in names.items() if f"{name}: Any" not in made}
    renamed = sorted(f"{name} = {attribute}" for name, (_, attribute) in split.items() if name != attribute)
    imports = {f"from {source} import {attribute}" + f" as {attribute}" * (attribute in names) for source, attribute in split.values()}
    lines = [HEADER, *sorted(imports)]
    if module in IN_EXAMPLES:
        lines.append(f"from {IN_EXAMPLES[module]} import *")
    if made or module in WITH_NAMES_OF_PLUGINS:
        lines.append("from typing import Any")
    if module in WITH_NAMES_OF_PLUGINS:
        lines.append(f"from {SHARED} import *")
        renamed.append("def __getattr__(name: str) -> Any: ...  # names of other plugins")
    return "\n".join([*lines, *made, *renamed]) + "\n"


def stubs() -> dict[str, str]:
    """Return the text of each stub file, by the path of the file in the repository."""
    modules = references()
    packages = {module.rpartition(".")[0] for module in modules}
    return {
        "/".join([SOURCES, PACKAGE, *module.split(".")[1:]]) + ("/__init__.pyi" if module in packages else ".pyi"): stub(module, names)
        for module, names in modules.items()
    }


def out_of_date(root: Path = ROOT) -> list[str]:
    """Return the stub files that are missing, that have other contents, or that belong to no module."""
    wanted = stubs()
    there = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in (root / SOURCES).rglob("*.pyi")}
    return sorted(path for path in wanted.keys() | there.keys() if wanted.get(path) != there.get(path))


def main() -> int:
    """Compare the stub files with the current names, or write the files."""
    parser = argparse.ArgumentParser(prog="python -m tools.public_stubs", description="Stub files of AMD Quark's public modules.")
    parser.add_argument("--write", action="store_true", help="write them")
    write, paths = parser.parse_args().write, out_of_date()
    wanted = stubs()
    for path in paths:
        if not write:
            print(f"{path} is out of date: python -m tools.public_stubs --write")
        elif path in wanted:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(wanted[path], encoding="utf-8")
        else:
            (ROOT / path).unlink()
    return int(bool(paths) and not write)


if __name__ == "__main__":
    sys.exit(main())
