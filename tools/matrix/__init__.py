"""Run the tests with several versions of Python, torch and transformers; see `tools.matrix.__main__`."""
