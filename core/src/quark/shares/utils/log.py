"""``quark.shares.utils.log``: the older name of `quark.common.utils.log`."""

from __future__ import annotations

from quark.common.utils.log import ScreenLogger

__all__ = ["ScreenLogger"]
