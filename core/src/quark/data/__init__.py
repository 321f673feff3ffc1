"""Text for calibration and evaluation: registered sources of samples, and the sequences of tokens that are made of them."""

from quark.data.samples import Message, Sample, sample_of
from quark.data.sequences import token_sequences
from quark.data.sources import read_samples
from quark.data.text import text_of

__all__ = ["Message", "Sample", "read_samples", "sample_of", "text_of", "token_sequences"]
