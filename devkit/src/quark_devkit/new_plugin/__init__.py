"""The generator behind ``quark new-plugin``: a distribution from templates, with plugins of some kinds."""

from quark_devkit.new_plugin.distribution import Naming, new_distribution
from quark_devkit.new_plugin.kinds import PLUGIN_KINDS, PluginKind

__all__ = ["PLUGIN_KINDS", "Naming", "PluginKind", "new_distribution"]
