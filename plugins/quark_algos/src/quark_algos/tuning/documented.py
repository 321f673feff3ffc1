"""AMD Quark's names of block tuning: settings, and a function and a processor that tune a model.

Settings have AMD Quark's fields; the model must be quantized.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import attrs
from torch import nn

from quark.base.log import get_logger
from quark.config.algorithm import AlgoConfig
from quark.config.fields import with_dataclass_view
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.runs import ModelQuantizer
from quark_algos.fields import LEGACY, with_positional
from quark_algos.tuning import config

__all__ = ["AutoRoundConfig", "AutoRoundProcessor", "BlockwiseJointTuningConfig", "BlockwiseTuningConfig", "blockwise_tuning_algo"]


@with_positional(
    *("name", "iters", "lr", "enable_minmax_tuning", "minmax_lr", "batch_size", "inside_layer_modules", "model_decoder_layers")
)
@with_dataclass_view
@attrs.define(kw_only=True)
class AutoRoundConfig(config.AutoRoundConfig):
    """Settings of AutoRound, with two more fields of AMD Quark's class.

    The layers follow from the model's family.

    Attributes:
        inside_layer_modules: Without effect.
        model_decoder_layers: Without effect.
    """

    inside_layer_modules: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    model_decoder_layers: str | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)


def _name(_: str) -> str:
    """Return the registered name of these settings."""
    return "tuning"


@with_positional(
    *("name", "epochs", "weight_lr", "weight_decay", "min_lr_factor", "max_grad_norm", "model_decoder_layers", "trainable_modules")
)
@with_dataclass_view
@attrs.define(kw_only=True)
class BlockwiseTuningConfig(config.TuningConfig):
    """Settings of block tuning with AMD Quark's names.

    Of AMD Quark's fields, only ``epochs`` has an effect: step sizes are relative here.

    Attributes:
        weight_lr: Without effect: see ``lr``, ``scale_lr`` and ``norm_lr``.
        qparam_lr: Without effect.
        weight_decay: Without effect.
        qparam_weight_decay: Without effect.
        min_lr_factor: Without effect.
        max_grad_norm: Without effect.
        model_decoder_layers: Without effect.
        trainable_modules: Without effect.
        quant_trainable_modules: Without effect.
    """

    name: str = attrs.field(default="tuning", converter=_name)
    epochs: int = 5
    weight_lr: float | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    qparam_lr: float | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    weight_decay: float | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    qparam_weight_decay: float | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    min_lr_factor: float | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    max_grad_norm: float | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    model_decoder_layers: str | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    trainable_modules: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    quant_trainable_modules: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)

    def __attrs_post_init__(self) -> None:
        legacy = [field.name for field in attrs.fields(type(self)) if field.metadata.get("legacy") and getattr(self, field.name)]
        if legacy:
            get_logger(__name__).warning(
                f"{type(self).__name__} ignores {', '.join(legacy)}. Set step sizes with lr, scale_lr and norm_lr, which are relative; "
                f"choose tuned parts with rounding, scales and norms."
            )


@with_positional(
    *("name", "epochs", "weight_lr", "qparam_lr", "weight_decay", "qparam_weight_decay", "min_lr_factor", "max_grad_norm"),
    *("model_decoder_layers", "trainable_modules", "quant_trainable_modules"),
)
@with_dataclass_view
@attrs.define(kw_only=True)
class BlockwiseJointTuningConfig(BlockwiseTuningConfig):
    """The same settings: weights and scales are always tuned together."""


def blockwise_tuning_algo(
    fp_model: nn.Module,
    model: nn.Module,
    blockwise_tuning_config: AlgoConfig | None,
    is_accelerate: bool | None = None,
    dataloader: Iterable[Any] | None = None,
) -> nn.Module:
    """Return ``model``, quantized again from a copy of the float model, with block tuning.

    Tuning runs after the algorithms that quantized the model.

    Args:
        fp_model: The float model; it is not changed.
        model: The result of `quark.runs.ModelQuantizer.quantize_model` for another copy; changed in place.
        blockwise_tuning_config: Settings of tuning or AutoRound; with None nothing is done.
        is_accelerate: Without effect.
        dataloader: Calibration data.

    Raises:
        ConfigError: (a ValueError) ``model`` has not been quantized.
        QuarkError: As `quark.runs.ModelQuantizer.quantize_model` raises it.
    """
    if blockwise_tuning_config is None:
        return model
    own = getattr(model, "quant_config", None)
    if not isinstance(own, QConfig):
        raise ConfigError(f"blockwise_tuning_algo needs a quantized model: quantize this {type(model).__name__} with ModelQuantizer first")
    tuned = copy.deepcopy(fp_model)
    algorithms = [*(own.algo_config or ()), blockwise_tuning_config]
    ModelQuantizer(attrs.evolve(own, algo_config=algorithms)).quantize_model(tuned, dataloader)
    vars(model).update(vars(tuned))
    return model


class AutoRoundProcessor:
    """Tunes a quantized model; arguments as in `blockwise_tuning_algo`."""

    def __init__(self, fp_model: nn.Module, model: nn.Module, algo_config: AlgoConfig, data_loader: Iterable[Any]) -> None:
        self.fp_model, self.model, self.config, self.data_loader = fp_model, model, algo_config, data_loader

    def apply(self) -> None:
        """Tune the model in place; raises as `blockwise_tuning_algo`."""
        blockwise_tuning_algo(self.fp_model, self.model, self.config, dataloader=self.data_loader)
