"""Evaluation: perplexity of a model, and KL divergence from a reference model, over batches of tokens."""

from quark.evaluate.comparison import Comparison, compare
from quark.evaluate.perplexity import perplexity
from quark.evaluate.windows import token_windows

__all__ = ["Comparison", "compare", "perplexity", "token_windows"]
