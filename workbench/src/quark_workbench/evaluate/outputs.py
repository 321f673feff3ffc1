"""Comparison of the outputs of two models that do not predict next tokens.

Examples are embedders, classifiers, masked language models, and encoder-decoder models.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.errors import UnsupportedError
from quark_workbench.evaluate.sample_windows import SampleWindow
from quark_workbench.evaluate.windows import Windows

__all__ = ["OutputSimilarity", "compare_outputs", "gives_next_tokens"]

_IDS = "input_ids"


@attrs.frozen
class OutputSimilarity:
    """The similarity of one output of a model to the same output of the reference.

    Attributes:
        cosine: Mean cosine between corresponding vectors of both models, such as the hidden states of a
            token. It is at most 1.
        lowest_cosine: The smallest of these cosines.
        relative_error: Norm of the difference between both outputs ÷ norm of the reference's output.
        vectors: Number of compared vectors.
    """

    cosine: float
    lowest_cosine: float
    relative_error: float
    vectors: int


def gives_next_tokens(model: nn.Module) -> bool:
    """Return whether a model predicts next tokens, as decoders do."""
    can_generate: Any = getattr(model, "can_generate", None)
    is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return (can_generate is None or bool(can_generate())) and not is_encoder_decoder


@torch.no_grad()
def compare_outputs(model: nn.Module, reference: nn.Module, batches: Iterable[Windows]) -> dict[str, OutputSimilarity]:
    """Compare the outputs of a model with those of a reference.

    Return a dictionary from the name of an output to its similarity.

    Args:
        model: A model that takes token ids. In an encoder-decoder model, the decoder gets the same ids as the
            encoder.
        reference: A model of the same class.
        batches: Windows of tokens.

    Raises:
        UnsupportedError: The models need more than token ids.
    """
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for windows in batches:
        outputs, expected = _outputs(model, windows), _outputs(reference, windows)
        for name in (name for name in outputs if name in expected):
            pairs.setdefault(name, []).append((_vectors(outputs[name]), _vectors(expected[name])))
    if not pairs:
        raise UnsupportedError(
            f"a {type(model).__name__} and a {type(reference).__name__} have no output in common: compare models of one class"
        )
    return {name: _similarity(*(torch.cat(parts) for parts in zip(*found, strict=True))) for name, found in pairs.items()}


def _outputs(model: Any, windows: Windows) -> dict[str, Tensor]:
    ids = windows.tokens.to(next(model.parameters()).device)
    inputs = {_IDS: ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    if isinstance(windows, SampleWindow):
        inputs = windows.arguments(model)
    name = type(model).__name__
    if model.main_input_name not in inputs:
        raise UnsupportedError(f"a {name} takes {model.main_input_name}, not token ids: compare its outputs in Python")
    try:
        outputs = model(**inputs)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"a {name} needs more than token ids ({error}): compare its outputs in Python") from error
    return {key: value for key, value in outputs.items() if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1}


def _vectors(output: Tensor) -> Tensor:
    return output.flatten(0, -2).double().cpu()


def _similarity(vectors: Tensor, expected: Tensor) -> OutputSimilarity:
    cosines = nn.functional.cosine_similarity(vectors, expected, dim=-1)
    error = (vectors - expected).norm() / expected.norm()
    return OutputSimilarity(float(cosines.mean()), float(cosines.min()), float(error), len(vectors))
