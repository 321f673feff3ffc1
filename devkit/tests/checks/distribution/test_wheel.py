"""Checks of a wheel leave the process as it is."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python has no distutils of its own")
def test_distutils_stays_that_of_setuptools() -> None:
    code = (
        "import importlib.util; from quark_devkit.checks.distribution import wheel; assert wheel._has_pip(); "
        "print(importlib.util.find_spec('distutils').origin)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "setuptools" in done.stdout
