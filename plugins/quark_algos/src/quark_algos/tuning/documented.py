"""Block tuning under the names of AMD Quark: settings classes, a function and a processor that tune a model.

The settings classes have the fields of AMD Quark's classes. The model to tune must already be quantized.
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
    """Settings of AutoRound, with two additional fields for compatibility with AMD Quark. These fields have
    no effect.

    The model family determines the layers.

    Attributes:
        inside_layer_modules: This field has no effect.
        model_decoder_layers: This field has no effect.
    """

    inside_layer_modules: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    model_decoder_layers: str | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)


def _name(_: str) -> str:
    """Return the registered name of the algorithm ``tuning``. The argument is ignored."""
    return "tuning"


@with_positional(
    *("name", "epochs", "weight_lr", "weight_decay", "min_lr_factor", "max_grad_norm", "model_decoder_layers", "trainable_modules")
)
@with_dataclass_view
@attrs.define(kw_only=True)
class BlockwiseTuningConfig(config.TuningConfig):
    """Settings of block tuning, with the fields of AMD Quark's class.

    Of AMD Quark's fields, only ``epochs`` has an effect. The step sizes of this project are relative, unlike
    the step sizes of AMD Quark, so their fields have other names.

    Attributes:
        weight_lr: This field has no effect. Set ``lr``, ``scale_lr`` and ``norm_lr`` instead.
        qparam_lr: This field has no effect.
        weight_decay: This field has no effect.
        qparam_weight_decay: This field has no effect.
        min_lr_factor: This field has no effect.
        max_grad_norm: This field has no effect.
        model_decoder_layers: This field has no effect.
        trainable_modules: This field has no effect.
        quant_trainable_modules: This field has no effect.
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
                f"{type(self).__name__} ignores {', '.join(legacy)}. Set relative step sizes with 'lr', 'scale_lr' and 'norm_lr'. "
                f"The options 'rounding', 'scales' and 'norms' choose what is tuned."
            )


@with_positional(
    *("name", "epochs", "weight_lr", "qparam_lr", "weight_decay", "qparam_weight_decay", "min_lr_factor", "max_grad_norm"),
    *("model_decoder_layers", "trainable_modules", "quant_trainable_modules"),
)
@with_dataclass_view
@attrs.define(kw_only=True)
class BlockwiseJointTuningConfig(BlockwiseTuningConfig):
    """The same settings as `BlockwiseTuningConfig`: weights and scales are always tuned together."""


def blockwise_tuning_algo(
    fp_model: nn.Module,
    model: nn.Module,
    blockwise_tuning_config: AlgoConfig | None,
    is_accelerate: bool | None = None,
    dataloader: Iterable[Any] | None = None,
) -> nn.Module:
    """Quantize ``model`` again, with block tuning, and return it.

    A copy of the float model is quantized with the algorithms that were used for ``model``. Then the copy is
    tuned, and ``model`` gets the result.

    Args:
        fp_model: The float model. It is not changed.
        model: A quantized copy of the float model that `quark.runs.ModelQuantizer.quantize_model` has
            returned. It is changed in place.
        blockwise_tuning_config: Settings of tuning or AutoRound. If it is None, nothing is done.
        is_accelerate: This argument has no effect.
        dataloader: Calibration data.

    Raises:
        ConfigError: (a ValueError) ``model`` has not been quantized.
        QuarkError: Any error of `quark.runs.ModelQuantizer.quantize_model`.
    """
    if blockwise_tuning_config is None:
        return model
    own = getattr(model, "quant_config", None)
    if not isinstance(own, QConfig):
        raise ConfigError(f"blockwise_tuning_algo needs a quantized model. Quantize this {type(model).__name__} with ModelQuantizer first")
    tuned = copy.deepcopy(fp_model)
    algorithms = [*(own.algo_config or ()), blockwise_tuning_config]
    ModelQuantizer(attrs.evolve(own, algo_config=algorithms)).quantize_model(tuned, dataloader)
    vars(model).update(vars(tuned))
    return model


class AutoRoundProcessor:
    """Tunes a quantized model. The arguments are the same as for `blockwise_tuning_algo`."""

    def __init__(self, fp_model: nn.Module, model: nn.Module, algo_config: AlgoConfig, data_loader: Iterable[Any]) -> None:
        self.fp_model, self.model, self.config, self.data_loader = fp_model, model, algo_config, data_loader

    def apply(self) -> None:
        """Tune the model in place. This method raises the same errors as `blockwise_tuning_algo`."""
        blockwise_tuning_algo(self.fp_model, self.model, self.config, dataloader=self.data_loader)
