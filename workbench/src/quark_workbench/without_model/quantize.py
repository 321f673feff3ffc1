"""`quantize_without_model`, which quantizes a checkpoint from the names and shapes of its tensors alone."""

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
    "but without its class a model cannot run. Use a scheme with dynamic or float activations and no algorithm, or leave out "
    "--without-model (in Python: call quantize_checkpoint)"
)


def quantize_without_model(
    source: str | Path, out: str | Path, config: QConfig | str | Callable[[nn.Module], QConfig], **options: Any
) -> QuantPlan:
    """Quantize a checkpoint without its model class. Names and shapes of tensors tell which layers it has.

    Weights are rounded to nearest. The function runs no model of transformers and no code of the checkpoint.
    If transformers has the model class, `quark.runs.quantize_checkpoint` writes the same tensors.

    Args:
        source: Directory of a checkpoint with a config.json and safetensors files.
        out: Directory of the result, as in `quark.runs.quantize_checkpoint`.
        config: The configuration, or the name of a scheme, or a function that returns a configuration for the
            model on the meta device (`named_model`).
        **options: Further arguments of `quark.runs.quantize_checkpoint`, except ``data``,
            ``weight_converters`` and ``trust_remote_code``.

    Returns:
        The plan, which says how each layer was quantized. Its notes say what was inferred from names.

    Raises:
        UnsupportedError: The scheme needs calibration data, or the configuration has an algorithm.
        QuarkError: As in `quark.runs.quantize_checkpoint`.
    """
    if not isinstance(config, QConfig):
        model = named_model(Path(source), options.get("dtype", "auto"))
        config = template_of(model).get_config(scheme=config) if isinstance(config, str) else config(model)
    refuse_transforms(config)
    return quantize_checkpoint(source, out, config, refuse_forwards, build=named_model, weight_converters=(), **options)


def refuse_transforms(config: QConfig) -> None:
    """Raise UnsupportedError if a configuration has an algorithm, since algorithms need forward passes."""
    if config.algo_config:
        names = ", ".join(f"'{settings.name}'" for settings in config.algo_config)
        raise UnsupportedError(f"the algorithm {names} needs the outputs of the model, {_FIX}")


def refuse_forwards(wanted_by: str) -> NoReturn:
    """Raise UnsupportedError, because forward passes are impossible.

    ``wanted_by`` names the part of the run that needs them.
    """
    raise UnsupportedError(f"this run needs calibration forward passes for {wanted_by}, {_FIX}")
