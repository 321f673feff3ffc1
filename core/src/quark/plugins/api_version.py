"""The version of the plugin API, and the range of versions that a record or a plugin was written for.

The version counts changes that a plugin notices: a hook, a field of a record, or a method of a protocol that
is renamed, removed or newly required. It is independent of the versions of the distributions.
"""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["API_VERSION", "RENAMED", "ApiRange", "as_api_range"]

API_VERSION = 2
"""Version of the plugin API of this core; `tools/plugin_api/` holds each version's public names."""

RENAMED = "whoever maintains it finds what was renamed, old names and new, in docs/plugins/compatibility.md of quark's repository"
"""Advice in errors about plugins for an older version."""


def _version(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"the {attribute.name} version of a plugin API is a whole number from 1, not {value!r}")


@attrs.frozen
class ApiRange:
    """A range of versions of the plugin API, both ends included.

    >>> str(ApiRange(1, 2)), ApiRange(1, 2).allows(2), ApiRange(2, 2).allows(1)
    ('1 to 2', True, False)
    """

    lowest: int = attrs.field(validator=_version)
    highest: int = attrs.field(validator=_version)

    def __attrs_post_init__(self) -> None:
        if self.lowest > self.highest:
            raise ValueError(f"a range of API versions goes upwards: write ({self.highest}, {self.lowest})")

    def allows(self, version: int = API_VERSION) -> bool:
        """Return whether a version lies in the range."""
        return self.lowest <= version <= self.highest

    def __str__(self) -> str:
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest} to {self.highest}"

    def refusal(self) -> tuple[str, str]:
        """Return the predicate and the fix of an error about a range without this core's version."""
        fix = f"update the plugin; {RENAMED}" if self.highest < API_VERSION else "update quark-core (pip install --upgrade quark-core)"
        return f"is written for version {self} of the plugin API, and this quark-core has version {API_VERSION}", fix


def as_api_range(value: ApiRange | tuple[int, int] | int | None) -> ApiRange | None:
    """Return a range from ``(lowest, highest)`` or one version; None stays None.

    Raises:
        ValueError: It is no such range.
    """
    if value is None or isinstance(value, ApiRange):
        return value
    ends = (value, value) if isinstance(value, int) else value
    if not isinstance(ends, (tuple, list)) or len(ends) != 2:
        raise ValueError(f"a range of API versions is written (lowest, highest), not {value!r}")
    return ApiRange(*ends)
