"""quark-exporters: checkpoint exporters of quark."""
