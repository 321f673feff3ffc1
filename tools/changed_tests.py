"""Print the test files nearest to the changed files; ``make quick`` runs them.

A file counts as changed if it differs from the branch ``main``, whether the change is committed or not.
``--since`` names another commit to compare with. The tests of ``core/src/quark/config/tensor.py`` are
``core/tests/config/test_tensor.py`` and at most `MOST` test files that import the module. Test files of the
same distribution come first.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
MOST = 8
"""Largest number of test files that are listed because they import a module; more of them find little."""


def changed_files(since: str) -> list[str]:
    """Return the files that are new or have changed since the common ancestor of ``HEAD`` and ``since``."""
    base = _git("merge-base", since, "HEAD").strip() or since
    changed = _git("diff", "--name-only", "--diff-filter=d", base).splitlines()
    return sorted({*changed, *_git("ls-files", "--others", "--exclude-standard").splitlines()})


def nearest_tests(changed: Iterable[str], imports: dict[str, set[str]]) -> list[str]:
    """Return the nearest test files of the changed files, in the order of the changed files.

    Args:
        changed: Paths in the repository.
        imports: The modules that a test file imports, by the path of the test file.
    """
    chosen: dict[str, None] = {}
    for name in changed:
        path = PurePosixPath(name)
        if path.name.startswith("test_") and path.suffix == ".py":
            chosen[name] = None
        elif "src" in path.parts and path.suffix == ".py":
            chosen |= dict.fromkeys(_tests_of_module(path, imports))
    return [name for name in chosen if name in imports]


def _tests_of_module(path: PurePosixPath, imports: dict[str, set[str]]) -> Iterator[str]:
    at = path.parts.index("src")
    distribution, inside = "/".join(path.parts[:at]), path.parts[at + 2 :]
    yield "/".join([distribution, "tests", *inside[:-1], f"test_{path.stem}.py"])
    module = ".".join([*path.parts[at + 1 : -1], path.stem]).removesuffix(".__init__")
    users = [name for name, modules in imports.items() if module in modules]
    yield from sorted(users, key=lambda name: (not name.startswith(f"{distribution}/"), name))[:MOST]


def imports_of_tests(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the modules that each test file of the repository imports, by the path of the test file."""
    files = _git("ls-files", "--cached", "--others", "--exclude-standard", "*/test_*.py", cwd=root).splitlines()
    return {name: set(_modules((root / name).read_text("utf-8"))) for name in files if (root / name).exists()}


def _modules(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _git(*arguments: str, cwd: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="List the tests that are nearest to the changed files.")
    parser.add_argument("--since", default="main", metavar="COMMIT", help="branch or commit to compare with (main)")
    for test in nearest_tests(changed_files(parser.parse_args().since), imports_of_tests()):
        print(test)
