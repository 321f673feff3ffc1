"""Whole runs on a simulated accelerator, for checks of algorithms; the device itself where checks compute on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from quark.config.algorithm import AlgoConfig
from quark.errors import UnsupportedError
from quark.runs import ModelQuantizer
from quark_devkit.algorithm_runs import HARM, logit_error
from quark_devkit.check import NotApplicableError, require
from quark_devkit.simulated_device import SimulatedDevice, simulated_device
from quark_devkit.small_models import batches, logits, run_config, small_model

__all__ = ["accelerator", "require_run_on_accelerator"]


@contextmanager
def accelerator() -> Iterator[SimulatedDevice]:
    """Yield the simulated accelerator.

    Raises:
        NotApplicableError: This process has another device in its place.
    """
    with ExitStack() as stack:
        try:
            device = stack.enter_context(simulated_device())
        except UnsupportedError as error:
            raise NotApplicableError(str(error)) from None
        yield device


def require_run_on_accelerator(scheme: str, *settings: AlgoConfig) -> None:
    """Require that a run on a model of an accelerator finishes, leaves all tensors there, and comes as near the float model as on a CPU."""
    config, expected = run_config(scheme, *settings), logits(small_model())
    with accelerator() as device:
        model: Any = ModelQuantizer(config).quantize_model(small_model().to(device.name), batches())
        tensors = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        elsewhere = [name for name, tensor in tensors.items() if tensor.device.type != device.name]
        require(not elsewhere, f"leaves '{elsewhere[0] if elsewhere else ''}' on another device than the model, which is on an accelerator")
        found = logits(model, [x.to(device.name) for x in batches(4, seed=1)]).cpu()
    ratio = float((found - expected).square().mean()) / logit_error(scheme, *settings)
    require(ratio <= HARM, f"makes logits {ratio:.3g} times as wrong on an accelerator as on a CPU ({scheme})")
