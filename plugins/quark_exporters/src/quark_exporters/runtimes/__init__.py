"""Runtimes that load a checkpoint: `rules.toml` has the rules of their readers, `inspector` applies them."""
