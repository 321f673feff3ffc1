"""``quark.common``: documented package of what is not of torch."""
