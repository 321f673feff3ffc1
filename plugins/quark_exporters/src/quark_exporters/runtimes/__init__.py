"""Which runtimes load a checkpoint.

`rules.toml` has the rules of their readers, and `inspector` applies them.
"""
