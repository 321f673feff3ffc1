"""A third party's plugins: a module for each kind of plugin, with the hook that registers it."""
