"""`quantize_without_model`: a checkpoint is quantized by the names and shapes of its tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from quark.config.model import QConfig
from quark.errors import UnsupportedError
from quark.models.plan.family import template_of
from quark.models.plan.quant_plan import QuantPlan
from quark.runs import quantize_checkpoint
from quark_workbench.without_model.named_model import named_model

__all__ = ["quantize_without_model", "refuse_forwards", "refuse_transforms"]

_FIX = (
    "a checkpoint that is quantized without its model cannot run. Choose a scheme with dynamic or float activations and no algorithm, or "
    "leave out --without-model (quantize_checkpoint)"
)


def quantize_without_model(
    source: str | Path, out: str | Path, config: QConfig | str | Callable[[nn.Module], QConfig], **options: Any
) -> QuantPlan:
    """Quantize a checkpoint whose model class nobody knows, by the names and shapes of its tensors.

    Weights are rounded to nearest. Nothing is run: neither a model of transformers nor the checkpoint's own
    code. The result has the tensors that `quark.runs.quantize_checkpoint` gives where transformers knows the
    class.

    Args:
        source: Directory of a checkpoint with a config.json and safetensors files.
        out: As of `quark.runs.quantize_checkpoint`.
        config: What each layer gets; or the name of a scheme; or a function that makes the configuration for
            the model of names, which is on the meta device (`named_model`).
        **options: Further arguments of `quark.runs.quantize_checkpoint`, but ``data``, ``weight_converters``
            and ``trust_remote_code``.

    Returns:
        What was done to each layer, with notes on what names did not tell.

    Raises:
        UnsupportedError: A scheme needs calibration data, or an algorithm is asked for.
        QuarkError: As of `quark.runs.quantize_checkpoint`.
    """
    if not isinstance(config, QConfig):
        model = named_model(Path(source), options.get("dtype", "auto"))
        config = template_of(model).get_config(scheme=config) if isinstance(config, str) else config(model)
    refuse_transforms(config)
    return quantize_checkpoint(source, out, config, refuse_forwards, build=named_model, weight_converters=(), **options)


def refuse_transforms(config: QConfig) -> None:
    """Raise UnsupportedError if a configuration has an algorithm."""
    if config.algo_config:
        names = ", ".join(f"'{settings.name}'" for settings in config.algo_config)
        raise UnsupportedError(f"the algorithm {names} goes by the model's structure and outputs, and {_FIX}")


def refuse_forwards(wanted_by: str) -> NoReturn:
    """Raise UnsupportedError: ``wanted_by`` names the part of a run that needs forwards."""
    raise UnsupportedError(f"calibration forwards are needed by {wanted_by}, and {_FIX}")
