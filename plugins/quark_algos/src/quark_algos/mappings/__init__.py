"""Mappings of equalization: a smooth layer and its balance layers; how they are derived, resolved and folded."""
