"""What fields of several configuration classes share: the mark of those that only older documents have, and ranges of numbers."""

from __future__ import annotations

from attrs import validators

LEGACY = {"legacy": True}
"""Metadata of a keyword that is taken from older configurations and never written."""

positive = validators.gt(0)
"""Validator of numbers above 0."""
