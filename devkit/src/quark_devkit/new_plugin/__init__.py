"""The generator behind ``quark new-plugin``. It writes a distribution with plugins of chosen kinds from
templates."""

from quark_devkit.new_plugin.distribution import PLUGIN_KINDS, Naming, PluginKind, new_distribution

__all__ = ["PLUGIN_KINDS", "Naming", "PluginKind", "new_distribution"]
