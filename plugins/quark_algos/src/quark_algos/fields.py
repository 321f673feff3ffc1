"""Field metadata and validators that several configuration classes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import validators

__all__ = ["LEGACY", "OWN", "PRESETS", "UNUSED", "positive"]

LEGACY = {"legacy": True}
"""Metadata of a field that is read from configurations of older AMD Quark releases and never written."""

UNUSED = {"unused": True}
"""Metadata of a field that configurations of AMD Quark have and nothing here reads: it is kept in
configurations, and is no option.
"""

OWN = {"own": True}
"""Metadata of a field that AMD Quark's class does not have; it is written only if its value is not the
default.
"""

positive: Callable[[Any, Any, Any], Any] = validators.gt(0)
"""Validator of numbers above 0."""

PRESETS = ("best", "reference")
"""Presets: ``"best"`` by held-out perplexity, and ``"reference"``, the algorithm as published with AMD
Quark's defaults.
"""
