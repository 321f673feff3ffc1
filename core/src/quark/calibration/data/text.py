"""The text of a sample: itself, or a chat through the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quark.calibration.data.samples import Sample
from quark.errors import CalibrationError

__all__ = ["rendered", "text_of"]


def rendered(tokenizer: Any, sample: Sample) -> str:
    """Return the text of a sample.

    Raises:
        CalibrationError: The sample is a chat, and the tokenizer has no chat template, or one that refuses
            it.
    """
    if isinstance(sample, str):
        return sample
    if getattr(tokenizer, "chat_template", None) is None:
        raise CalibrationError("the data hold chats, and this tokenizer has no chat template: use one of a chat model, or plain text")
    try:
        text: str = tokenizer.apply_chat_template(list(sample), tokenize=False)
    except Exception as error:  # the template is code of the checkpoint, and may raise anything
        raise CalibrationError(f"the tokenizer's chat template refuses a chat of the data: {error}") from error
    return text


def text_of(tokenizer: Any, samples: Iterable[Sample]) -> str:
    """Return one text of all samples, with an empty line between two; errors as for `rendered`."""
    return "\n\n".join(rendered(tokenizer, sample) for sample in samples)
