"""Importing the package makes modules importable that have no files."""

from __future__ import annotations

import importlib
import sys

import quark
from quark.torch import _HandsOver


def test_importing_quark_adds_the_finder_of_modules_without_files_once() -> None:
    importlib.reload(quark)
    assert quark.__version__
    assert sys.meta_path.count(_HandsOver) == 1
