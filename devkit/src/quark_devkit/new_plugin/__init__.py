"""What `quark new-plugin` writes: a small distribution with a plugin of each chosen kind, from the templates of this package."""

from quark_devkit.new_plugin.distribution import Naming, new_distribution
from quark_devkit.new_plugin.kinds import PLUGIN_KINDS, PluginKind

__all__ = ["PLUGIN_KINDS", "Naming", "PluginKind", "new_distribution"]
