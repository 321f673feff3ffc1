"""A Llama of 1.7 million parameters with tokenizer and held-out text, as files; `quark.testing.tiny` loads it."""

from pathlib import Path

__all__ = ["DIRECTORY"]

DIRECTORY = Path(__file__).with_name("llama")
"""The checkpoint, in Hugging Face form; ``held_out.txt`` and ``PROVENANCE.md`` lie beside it."""
