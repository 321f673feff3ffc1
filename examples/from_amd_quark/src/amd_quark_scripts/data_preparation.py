"""The module ``quark.torch.utils.llm.data_preparation``. It loads calibration data by the names of AMD Quark
or of quark."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from amd_quark_scripts.model_preparation import available_device
from quark.errors import UnsupportedError
from quark_workbench.data import read_samples, token_sequences

__all__ = ["DATASETS", "calibration_data", "get_calib_dataloader", "get_pile10k_dataloader", "get_wikitext2"]

_APART: Mapping[str, Any] = MappingProxyType({"packing": False})
DATASETS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "pileval": ("pileval", _APART),
        "wikitext": ("wikitext", {}),
        "Salesforce/wikitext": ("wikitext", {}),
        "cnn_dailymail": ("cnn_dailymail", _APART),
        "abisee/cnn_dailymail": ("cnn_dailymail", _APART),
        "HuggingFaceH4/ultrachat_200k": ("ultrachat", {"packing": False, "seed": 42}),
        "pileval_for_awq_benchmark": ("pileval", {"seed": 42}),
        "wikitext_for_gptq_benchmark": ("wikitext", {"seed": 0}),
    }
)
"""The source of each of AMD Quark's data sets, and the way to make sequences from it."""


def get_calib_dataloader(
    dataset_name: str,
    processor: Any = None,
    tokenizer: Any = None,
    batch_size: int = 1,
    num_calib_data: int = 512,
    seqlen: int = 512,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Return calibration data from a data set of AMD Quark or from another source.

    If ``dataset_name`` is a name of AMD Quark and not the name of a benchmark, each sequence is one sample
    that is cut at ``seqlen`` tokens. Otherwise, samples are packed into sequences.

    Unlike in AMD Quark, a batch with padding has an attention mask, so that padding tokens do not enter
    statistics.

    Args:
        dataset_name: A name of AMD Quark, or a path or name that `quark_workbench.data.read_samples` accepts.
        processor: Ignored, because calibration uses text. AMD Quark uses it for images.
        tokenizer: Tokenizer of the model.
        batch_size: Number of sequences in a batch.
        num_calib_data: Number of sequences.
        seqlen: Largest number of tokens in a sequence.
        device: Device of the batches. On a machine without CUDA, "cuda" means the CPU.
        kwargs: Other arguments of AMD Quark's functions. They are ignored.

    Raises:
        UnsupportedError: The data contain images.
        CalibrationError: `quark_workbench.data.read_samples` or `quark_workbench.data.token_sequences`
            raises this error.
    """
    batches = calibration_data(dataset_name, tokenizer, batch_size, num_calib_data, seqlen)
    target = available_device(device)
    moved: Any = [b.to(target) if isinstance(b, Tensor) else {k: v.to(target) for k, v in b.items()} for b in batches]
    return DataLoader(moved, batch_size=None)


def calibration_data(name: str, tokenizer: Any, batch_size: int, count: int, length: int) -> list[Any]:
    """Return the batches of `get_calib_dataloader` on the CPU. Raise the same errors."""
    if name == "ScienceQA":
        raise UnsupportedError("ScienceQA has images, and quark calibrates on text: use another data set, or your own batches")
    source, choices = DATASETS.get(name, (name, {}))
    return token_sequences(tokenizer, read_samples(source), count, length, batch_size=batch_size, **choices)


def get_pile10k_dataloader(
    tokenizer: Any, train_size: int = 512, seqlen: int = 2048, seed: int = 0, batch_size: int = 8
) -> tuple[DataLoader[Any], None]:
    """Return calibration data from the Pile in packed windows of ``seqlen`` tokens. The second result is
    None.

    The function raises the same errors as `get_calib_dataloader`.

    AMD Quark reads samples from the data set NeelNanda/pile-10k. This function reads them from ``pileval``.
    """
    samples = token_sequences(tokenizer, read_samples("pileval"), train_size, seqlen, batch_size=batch_size, seed=seed)
    batches: Any = samples
    return DataLoader(batches, batch_size=None), None


def get_wikitext2(tokenizer: Any, nsamples: int, seqlen: int, device: str | None = None, seed: int = 0) -> Tensor:
    """Return random windows of WikiText-2 as a tensor ``[nsamples, seqlen]``.

    The function raises the same errors as `get_calib_dataloader`.
    """
    batches = token_sequences(tokenizer, read_samples("wikitext"), nsamples, seqlen, seed=seed)
    return torch.cat([batch for batch in batches if batch.shape[1] == seqlen]).to(available_device(device))
