"""Examples in docstrings run, and print the results that they show."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "core/src", *sorted(ROOT.glob("plugins/*/src")), ROOT / "tiny_model/src", ROOT / "devkit/src"]


def modules_with_examples() -> list[str]:
    """Dotted names of all modules of the distributions that have an example."""
    files = [(source, p) for source in SOURCES for p in sorted(source.rglob("*.py")) if ">>> " in p.read_text(encoding="utf-8")]
    return [".".join(p.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for source, p in files]


def test_there_are_examples() -> None:
    assert len(modules_with_examples()) >= 12


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_of_a_module_print_what_they_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert done.attempted > 0
    assert done.failed == 0
