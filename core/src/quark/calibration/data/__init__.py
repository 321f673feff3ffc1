"""Text for calibration and evaluation: registered sources of samples, and sequences of tokens."""

from quark.calibration.data.samples import Message, Sample, sample_of, text_of
from quark.calibration.data.sequences import token_sequences
from quark.calibration.data.sources import read_samples

__all__ = ["Message", "Sample", "read_samples", "sample_of", "text_of", "token_sequences"]
