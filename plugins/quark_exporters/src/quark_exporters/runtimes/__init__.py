"""Finds the runtimes that can load a checkpoint.

`rules.toml` has the rules of their readers, and `inspector` applies them.
"""
