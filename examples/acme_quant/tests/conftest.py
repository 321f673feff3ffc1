"""Imports acme_quant from its source folder, whether it is installed or not."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

# The folder does not stay on the path. If a build left metadata in the folder, all other tests would find the
# plugin.
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).resolve().parents[1] / "src")
    for name in ("codebook", "observer", "plugin", "schemes", "weighted", "weighted_config"):
        importlib.import_module(f"acme_quant.{name}")
