"""Turn a float model into one that a checkpoint's tensors fit: the step before loading them, for our reader and for transformers'."""

from __future__ import annotations

from torch import nn

from quark.errors import UnsupportedError
from quark.model.resolve import layer_config_for
from quark.nn import QUANTIZED_TYPES
from quark.nn.packed import PackedLayer
from quark.specs.model import QConfig


def map_to_quark(model: nn.Module, quant_config: QConfig, pack_method: str = "reorder", custom_mode: str = "quark") -> nn.Module:
    """Replace every layer that the configuration quantizes by a `PackedLayer`, in place.

    Args:
        model: A float model, its weights on the meta device or not; they are not used.
        quant_config: From the checkpoint's ``quantization_config``.
        pack_method: From its ``export`` block.
        custom_mode: Documented; other layouts than Quark's are read by their own loaders.

    Returns:
        The same object.

    Raises:
        UnsupportedError: Another ``custom_mode``.
        ConfigError, UnknownNameError: The configuration does not fit the model, or asks for a format that is not installed.
    """
    if custom_mode != "quark":
        raise UnsupportedError(
            f"checkpoints of custom_mode '{custom_mode}' are not read here: only 'quark' is; transformers reads others by itself"
        )
    for name, layer in list(model.named_modules()):
        if type(layer) not in QUANTIZED_TYPES:
            continue
        config = layer_config_for(quant_config, name, type(layer)).config
        if config is not None:
            model.set_submodule(name, PackedLayer(layer, config, pack_method))
    return model
