"""``quark.torch.algorithm``: AMD Quark's package of algorithms; its modules come from plugins (see `quark.compat.plugin_modules`)."""
