"""Evaluation over windows of tokens: perplexity under a protocol, and KL divergence from a reference."""

from quark_workbench.evaluate.comparison import Comparison, compare
from quark_workbench.evaluate.perplexity import Likelihood, likelihood, perplexity
from quark_workbench.evaluate.protocol import PROTOCOLS, Protocol, protocol_of
from quark_workbench.evaluate.windows import Windows, scored_windows, token_windows

__all__ = [
    "PROTOCOLS",
    "Comparison",
    "Likelihood",
    "Protocol",
    "Windows",
    "compare",
    "likelihood",
    "perplexity",
    "protocol_of",
    "scored_windows",
    "token_windows",
]
