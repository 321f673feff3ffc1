"""``quark.common``: AMD Quark's package for what does not belong to torch."""
