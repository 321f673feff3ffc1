"""DepthError: the error of the hidden states after each block.

It is measured where calibration has a float forward beside the quantized one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quark.algorithms import OutputError
from quark.calibration.figures import decibels
from quark.calibration.forwards import current_forward
from quark.calibration.output_error import tensor_of
from quark.models.plan.decoder_blocks import Block

__all__ = ["DEPTH_CALLS", "DepthError", "depth_figures"]

DEPTH_CALLS = 4
"""Calibration samples whose hidden states are compared: a few thousand tokens give the mean to about a tenth
of a dB.
"""


class DepthError:
    """Compares the hidden states of float and quantized forwards of the same calls, block by block.

    Those of the first `DEPTH_CALLS` calls are held from the time that one of the two leaves a block until the
    other does.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[str, int, bool], Tensor] = {}
        self._errors: dict[str, list[OutputError]] = {}

    @contextmanager
    def watching(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Compare the outputs of the blocks while the body runs."""
        with ExitStack() as stack:
            for block in blocks:
                stack.callback(block.module.register_forward_hook(self._hook(block.name)).remove)
            yield

    def of(self, block: str) -> dict[str, Any]:
        """Return the figures of a block, as `depth_figures`, and forget its errors.

        Empty where nothing was compared.
        """
        return depth_figures(self._errors.pop(block, []))

    def _hook(self, name: str) -> Any:
        def compare(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            forward = current_forward()
            if forward is None or forward.is_probe or forward.number >= DEPTH_CALLS:
                return
            hidden = tensor_of(output).flatten(0, -2)
            other = self._left.pop((name, forward.number, not forward.is_float), None)
            if other is None:
                self._left[name, forward.number, forward.is_float] = hidden
            else:
                pair = (other, hidden) if forward.is_float else (hidden, other)
                self._errors.setdefault(name, []).append(OutputError.of(*pair))

        return compare


def depth_figures(errors: Sequence[OutputError]) -> dict[str, Any]:
    """Return the mean relative squared error of some tokens' hidden states, as such and in dB.

    The second is the signal-to-noise ratio. Empty without tokens.

    Returns:
        ``relative_error``: ‖h − ĥ‖² ÷ ‖h‖² of each token, averaged, so that a token with massive activations
            counts as any other;
        ``snr_db``: −10 log10 of that, None where there is no error; ``tokens``.
    """
    relative = torch.cat([error.relative for error in errors]) if errors else torch.zeros(0, dtype=torch.float32)
    if not len(relative):
        return {}
    mean = float(relative.mean())
    return {"relative_error": mean, "snr_db": decibels(1.0, mean), "tokens": len(relative)}
