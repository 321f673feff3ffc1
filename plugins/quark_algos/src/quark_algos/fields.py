"""What fields of several configuration classes share: the mark of those that only older documents have, and ranges of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import validators

__all__ = ["LEGACY", "OWN", "PRESETS", "positive"]

LEGACY = {"legacy": True}
"""Metadata of a keyword that is taken from older configurations and never written."""

OWN = {"own": True}
"""Metadata of a keyword that the documented class does not have: written only where it is not the default."""

positive: Callable[[Any, Any, Any], Any] = validators.gt(0)
"""Validator of numbers above 0."""

PRESETS = ("best", "reference")
"""What wins on held-out text, and what is published or documented."""
