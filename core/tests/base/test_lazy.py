"""``quark.templates()`` and ``quark.algorithms()`` are registries, though packages have these names."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("first", ["", "import quark.algorithms;", "import quark.torch; quark.torch.ModelQuantizer;"])
def test_registries_can_be_asked_for_whatever_was_imported_before(first: str) -> None:
    code = f"import quark; {first} print(type(quark.templates()).__name__, type(quark.algorithms()).__name__)"
    done = subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["TemplateRegistry", "AlgorithmRegistry"], done.stderr
