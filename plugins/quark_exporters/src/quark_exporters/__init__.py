"""quark-exporters."""
