"""Text for calibration and evaluation: registered sources of samples, and the sequences of tokens that are made of them."""

from quark.calibration.data.samples import Message, Sample, sample_of, text_of
from quark.calibration.data.sequences import token_sequences
from quark.calibration.data.sources import read_samples

__all__ = ["Message", "Sample", "read_samples", "sample_of", "text_of", "token_sequences"]
