"""``quark.shares.utils.log``: the older name of `quark.common.utils.log`."""

from quark.common.utils.log import *  # noqa: F403
from quark.common.utils.log import __all__ as __all__
