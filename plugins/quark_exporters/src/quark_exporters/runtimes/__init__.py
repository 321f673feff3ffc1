"""Finds the runtimes that can load a checkpoint.

`rules.toml` has rules about what each runtime reads, and `inspector` applies these rules.
"""
