"""``quark.common.utils``: package of AMD Quark's public module `log`."""
