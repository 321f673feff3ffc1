"""Mappings: a norm or layer, and the layers that read it, between which scale can be moved; and how they are resolved and folded."""
