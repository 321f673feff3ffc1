"""``quark.common.utils``: documented package of the module `log`."""
