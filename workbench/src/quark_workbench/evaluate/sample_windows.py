"""Windows made from samples with images or sounds.

The model gets the text and the images or sounds, but only tokens of the text are scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark_workbench.data.media_rows import MediaRow
from quark_workbench.data.processor import SampleProcessor
from quark_workbench.data.samples import Sample
from quark_workbench.evaluate.windows import Windows

__all__ = ["SampleWindow", "sample_windows"]

_IDS, _DECODER_IDS = "input_ids", "decoder_input_ids"


@attrs.frozen(eq=False)
class SampleWindow(Windows):
    """A single window with all tokens of one sample.

    Attributes:
        inputs: Arguments of the model, such as token ids and pixels.
        placeholders: The ids of tokens that stand where an image or a sound belongs. Such tokens are not
            scored.
    """

    inputs: Mapping[str, Tensor] = attrs.field(factory=dict)
    placeholders: Tensor = attrs.field(factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def scored(self) -> Tensor:
        """A boolean tensor ``[1, T − 1]`` that says which tokens after the first one are scored."""
        return super().scored & ~torch.isin(self.tokens[:, 1:], self.placeholders)

    def arguments(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the arguments for a model, on its device. Floating-point arguments get the model's dtype."""
        device = next(model.parameters()).device
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1)
        return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in self.inputs.items()}

    def logits(self, model: nn.Module) -> Tensor:
        """Return the logits ``[1, T − 1, V]`` with which a model predicts each token but the first."""
        logits: Tensor = model(**self.arguments(model)).logits
        return logits[:, :-1]


def sample_windows(processor: SampleProcessor, samples: Iterable[Sample]) -> list[SampleWindow]:
    """Return a window for each sample.

    The tokens of the text after the first image or sound are scored. In a sample without image and sound, all
    tokens but the first are scored. For a speech model, the tokens after the decoder's prompt are scored.

    Args:
        processor: The processor of the models.
        samples: Samples, some of them with images or sounds.

    Raises:
        ConfigError: There is no sample.
        QuarkError: `SampleProcessor.arguments` raises this error.
    """
    windows = [_window(processor, sample, f"sample {number}") for number, sample in enumerate(samples, 1)]
    if not windows:
        raise ConfigError("the data have no sample: give at least one sample")
    return windows


def _window(processor: SampleProcessor, sample: Sample, name: str) -> SampleWindow:
    inputs = processor.arguments(sample, name)
    tokens: Any = inputs.get(_DECODER_IDS, inputs.get(_IDS))
    if tokens is None:  # a model without text, such as a classifier of images
        tokens = torch.zeros(1, 1, dtype=torch.int64)
    placeholders = torch.tensor(processor.placeholders, dtype=torch.int64)
    if processor.is_speech_to_text:
        first = len(processor.prompt(sample.language if isinstance(sample, MediaRow) else None))
    else:
        positions = torch.isin(tokens[0], placeholders).nonzero().flatten().tolist()
        first = max([1, *positions[:1]])
    return SampleWindow(tokens, torch.tensor([first]), None, inputs, placeholders)
