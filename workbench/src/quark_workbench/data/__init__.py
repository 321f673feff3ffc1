"""Data for calibration and evaluation: registered sources of samples, and token sequences from samples."""

from quark_workbench.data.samples import Message, Sample, sample_of, text_of
from quark_workbench.data.sequences import token_sequences
from quark_workbench.data.sources import read_samples

__all__ = ["Message", "Sample", "read_samples", "sample_of", "text_of", "token_sequences"]
