"""quark-schemes."""
