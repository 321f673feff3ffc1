"""Imports acme_quant from its source folder, installed or not."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

# The folder leaves the path again: metadata that a build may have left in it would make the plugin one of all
# other tests.
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).resolve().parents[1] / "src")
    for name in ("codebook", "observer", "plugin", "schemes", "weighted", "weighted_config"):
        importlib.import_module(f"acme_quant.{name}")
