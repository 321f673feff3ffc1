"""``quark.shares.utils.import_utils``: the older name of `quark.common.utils.import_utils`."""

from quark.common.utils.import_utils import *  # noqa: F403
from quark.common.utils.import_utils import __all__ as __all__
