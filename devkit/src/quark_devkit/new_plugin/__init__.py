"""The generator behind ``quark new-plugin``: a distribution from templates, with plugins of some kinds."""

from quark_devkit.new_plugin.distribution import PLUGIN_KINDS, Naming, PluginKind, new_distribution

__all__ = ["PLUGIN_KINDS", "Naming", "PluginKind", "new_distribution"]
