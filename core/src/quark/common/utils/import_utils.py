"""``quark.common.utils.import_utils``: AMD Quark's questions about the installed transformers."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

__all__ = ["is_transformers_version_higher_or_equal", "is_transformers_version_lower"]


def is_transformers_version_higher_or_equal(target_version: str) -> bool:
    """Return whether the installed transformers is of this version or a later one."""
    return Version(version("transformers")) >= Version(target_version)


def is_transformers_version_lower(target_version: str) -> bool:
    """Return whether the installed transformers is older than this version."""
    return not is_transformers_version_higher_or_equal(target_version)
