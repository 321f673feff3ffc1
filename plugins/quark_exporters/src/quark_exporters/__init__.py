"""The checkpoint exporters of quark, as the plugin quark-exporters."""
