"""The package itself: importing it makes the public modules importable that have no files."""

from __future__ import annotations

import sys

import quark
from quark.torch.finder import PublicModules


def test_importing_quark_installs_the_finder_of_public_modules_once() -> None:
    assert quark.__version__
    assert sum(isinstance(finder, PublicModules) for finder in sys.meta_path) == 1
