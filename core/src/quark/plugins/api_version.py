"""The version of the plugin API, and the range of versions for which a plugin was written.

The version increases if a hook, a field of a record or a method of a protocol is renamed or removed, or if it
is now required. The version is independent of the versions of the distributions.
"""

from __future__ import annotations

API_VERSION = 2
"""Version of the plugin API of this core. `tools/plugin_api/` lists the public names of each version."""

RENAMED = "docs/plugins/compatibility.md of quark's repository lists old and new names"
"""Advice for messages about plugins that were written for an older version of the plugin API."""

ApiRange = tuple[int, int]
"""The lowest and the highest version that a plugin was written for."""


def as_api_range(value: object) -> ApiRange | None:
    """Return a range of versions from ``(lowest, highest)`` or from a single version. Return None for None.

    Raises:
        ValueError: The value is neither a pair ``(lowest, highest)`` nor a version.

    >>> as_api_range((1, 2)), as_api_range(2), as_api_range(None)
    ((1, 2), (2, 2), None)
    """
    if value is None:
        return None
    ends = value if isinstance(value, tuple | list) else (value, value)
    if len(ends) != 2 or not all(type(end) is int and end > 0 for end in ends) or ends[0] > ends[1]:
        raise ValueError(f"a range of API versions is (lowest, highest), two whole numbers of at least 1, not {value!r}")
    return ends[0], ends[1]


def refusal(api: ApiRange | None) -> tuple[str, str] | None:
    """Return why this core refuses a plugin that was written for the API versions ``api``, and the fix.

    The reason is a verb phrase. Return None if this core accepts the plugin.
    """
    if api is None or api[0] <= API_VERSION <= api[1]:
        return None
    versions = " to ".join(map(str, dict.fromkeys(api)))
    fix = f"update the plugin; {RENAMED}" if api[1] < API_VERSION else "update quark-core (pip install --upgrade quark-core)"
    return f"is written for version {versions} of the plugin API, and this quark-core has version {API_VERSION}", fix
