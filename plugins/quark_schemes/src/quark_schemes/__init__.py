"""The plugin quark-schemes, with quark's number formats, observers, packing and named schemes."""
