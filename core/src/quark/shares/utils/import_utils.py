"""``quark.shares.utils.import_utils``: the older name of `quark.common.utils.import_utils`."""

from __future__ import annotations

from quark.common.utils.import_utils import is_transformers_version_higher_or_equal, is_transformers_version_lower

__all__ = ["is_transformers_version_higher_or_equal", "is_transformers_version_lower"]
