"""quark-schemes: number formats, observers, packing and the named schemes of quark."""
