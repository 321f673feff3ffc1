"""``quark.torch.algorithm``: documented package of algorithms; its modules belong to plugins (see `quark.torch.plugin_modules`)."""
