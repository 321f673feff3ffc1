"""Every public module has its public names in ``__all__``, and the tool adds the missing ones."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""One."""

from __future__ import annotations

from a import b as b, c
if TYPE_CHECKING:
    from d import e

LIMIT = 3
_HIDDEN = 4


def f(): ...
'''


@pytest.fixture(scope="module")
def tool(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("tools/public_names.py")


def test_definitions_and_explicit_re_exports_are_public(tool: ModuleType) -> None:
    assert tool.public_names(ast.parse(SOURCE)) == ["b", "LIMIT", "f"]


def test_all_goes_behind_the_imports(tool: ModuleType) -> None:
    written = tool.with_all(SOURCE)
    assert '    from d import e\n\n__all__ = ["b", "LIMIT", "f"]\n\nLIMIT = 3\n' in written
    assert tool.declared(ast.parse(written)) == ["b", "LIMIT", "f"]


@pytest.mark.parametrize(
    ("source", "defects"),
    [
        (SOURCE, ["has no __all__"]),
        ('"""Only a docstring."""\n', []),
        ('__all__ = ["f", "g"]\ndef f(): ...\n', ["__all__ names g, which the module does not have"]),
        ('__all__ = ["g"]\ndef __getattr__(name): ...\n', []),
        ('from a import g\n__all__ = ["g"]\n', []),
    ],
)
def test_a_module_without_all_or_with_a_name_too_many_is_reported(
    tool: ModuleType, tmp_path: Path, source: str, defects: list[str]
) -> None:
    (tmp_path / "a.py").write_text(source)
    assert tool.defects(tmp_path / "a.py") == defects


def test_every_public_module_says_what_is_public(tool: ModuleType) -> None:
    assert {str(path.relative_to(ROOT)): lines for path in tool.modules() if (lines := tool.defects(path))} == {}


LISTING = {
    "core/src/quark/__init__.py": "the package itself",
    "core/src/quark/plugins/core_plugin.py": "pluggy registers the module",
    "core/src/quark/plugins/registries.py": "quark.plugins has all of its names",
}


def test_no_other_module_of_core_lists_its_names(tool: ModuleType) -> None:
    """What is imported from it inside core says as much."""
    public = set(tool.public_modules_of_core())
    others = [path for path in (ROOT / "core/src").rglob("*.py") if path not in public]
    listing = {path.relative_to(ROOT).as_posix() for path in others if "\n__all__ =" in path.read_text(encoding="utf-8")}
    assert listing == set(LISTING)
