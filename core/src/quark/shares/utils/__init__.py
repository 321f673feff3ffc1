"""``quark.shares.utils``: the older name of `quark.common.utils`."""
