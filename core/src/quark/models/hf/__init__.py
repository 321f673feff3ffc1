"""All code that depends on the library transformers.

It loads models, reads checkpoints in the form of transformers, and replaces attention functions.
"""
