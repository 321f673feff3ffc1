"""``quark.shares``: the older name of `quark.common`."""
