"""Observation of the activations of layers and attention modules during calibration forwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from quark.calibration.forwards import current_forward
from quark.errors import CalibrationError, NonFiniteError
from quark.models.layers import QuantizerModule
from quark.models.layers.attention import KEY, PROBABILITIES, QUERY, VALUE
from quark.numbers import QParams
from quark.numbers.observer import Observer

__all__ = ["Observation", "counting", "is_counted"]

_NAMES = {
    "input_tensors": "input of '{}'",
    "output_tensors": "output of '{}'",
    PROBABILITIES: "attention probabilities of '{}'",
    QUERY: "queries of '{}' after the rotary embedding",
    KEY: "keys of '{}' after the rotary embedding",
    VALUE: "values of '{}'",
}


@attrs.define(eq=False)
class Observation:
    """The observer of one activation during calibration.

    Attributes:
        owner: Full name of a layer, or of an attention module.
        slot: ``input_tensors`` or ``output_tensors`` of a layer, or an attribute of an attention module
            (`quark.models.layers.attention`).
        module: Its quantizer, which gets the scales.
        observer: Collects its range.
    """

    owner: str
    slot: str
    module: QuantizerModule
    observer: Observer

    @property
    def tensor(self) -> str:
        """The activation's name in messages, such as ``input of 'layers.0.up_proj'``."""
        return _NAMES[self.slot].format(self.owner)

    @property
    def has_seen(self) -> bool:
        """Whether any tensor was observed."""
        try:
            self.observer.range()
        except CalibrationError:
            return False
        return True

    @property
    def has_one_scale(self) -> bool:
        """Whether the activation has one scale, and not one per channel or block."""
        return self.module.quantizer.empty_qparams((1, 1), "meta").scale.ndim == 0

    def renew(self) -> None:
        """Forget the observations."""
        self.observer = self.module.quantizer.observer()

    def qparams(self) -> QParams:
        """Return the scales for the observed range.

        Raises:
            NonFiniteError: NaN or Inf was observed.
            CalibrationError: Nothing was observed.
        """
        try:
            low, high = self.observer.range()
        except CalibrationError as error:
            fix = "Give data that uses it" + (", or exclude it" if self.slot == "input_tensors" else "")
            raise CalibrationError(f"no calibration batch reached '{self.owner}': its static scale is not known. {fix}") from error
        if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
            raise NonFiniteError(
                f"the {self.tensor} holds NaN or Inf during calibration: the model overflows there (float16?), or weights or data are bad. "
                "Layers of earlier blocks are quantized already: load the model again before the next attempt",
                tensor=self.tensor,
            )
        return self.module.quantizer.qparams_from(self.observer)


@contextmanager
def counting(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, int]]:
    """Count the tokens that reach each of these layers while the body runs."""
    tokens = dict.fromkeys(names, 0)

    def see(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if is_counted():
                tokens[name] += args[0].numel() // args[0].shape[-1]

        return hook

    with ExitStack() as stack:
        for name in tokens:
            stack.callback(model.get_submodule(name).register_forward_pre_hook(see(name)).remove)
        yield tokens


def is_counted() -> bool:
    """Return whether tokens of the current forward count.

    Those of the float model and of a rehearsal, which is repeated, do not.
    """
    forward = current_forward()
    return forward is None or not (forward.is_float or forward.rehearsal is not None)
