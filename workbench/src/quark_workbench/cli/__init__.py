"""The command line: ``quark …``. Slow packages, such as torch, are imported only when a command runs."""
