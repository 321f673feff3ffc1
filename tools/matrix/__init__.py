"""The tests beside several versions of Python, torch and transformers; see `tools.matrix.__main__`."""
