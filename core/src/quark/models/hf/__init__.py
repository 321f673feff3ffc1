"""All code that depends on the library transformers.

This package loads models, reads checkpoints in the form that transformers uses, and replaces attention
functions.
"""
