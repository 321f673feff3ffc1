"""Quantized layers: the float layer's own class, with its weight rounded and its inputs and outputs fake-quantized."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from quark.nn.quantizer_module import QuantizerModule
from quark.specs.layer import QLayerConfig, TensorSpec


def _quantizer(spec: TensorSpec | None, *, activation: bool) -> QuantizerModule | None:
    return None if spec is None else QuantizerModule(spec, activation=activation)


class QuantizedLayer(nn.Module):
    """What every quantized layer adds to its float class.

    ``weight`` and ``bias`` hold values that lie on the grid of their quantizers, in the model's dtype, so that a forward is a plain one and
    the codes can be had back exactly.

    Attributes:
        layer_config: What was asked for.
        weight_quantizer, bias_quantizer: Scales of the parameters; None where they stay float.
        input_quantizer, output_quantizer: Applied at each forward; None where activations stay float.
    """

    layer_config: QLayerConfig
    weight_quantizer: QuantizerModule | None
    bias_quantizer: QuantizerModule | None
    input_quantizer: QuantizerModule | None
    output_quantizer: QuantizerModule | None

    @classmethod
    def from_float(cls, layer: nn.Module, config: QLayerConfig) -> Self:
        """A quantized layer around the same parameters, hooks and settings as ``layer``; nothing is copied, nothing rounded yet."""
        made = cls.__new__(cls)
        made.__dict__.update({k: dict(v) if type(v) is dict else v for k, v in layer.__dict__.items()})
        made._modules = dict(layer._modules)
        made.layer_config = config
        has_bias = getattr(layer, "bias", None) is not None
        made.weight_quantizer = _quantizer(config.weight, activation=False)
        made.bias_quantizer = _quantizer(config.bias if has_bias else None, activation=False)
        made.input_quantizer = _quantizer(config.input_tensors, activation=True)
        made.output_quantizer = _quantizer(config.output_tensors, activation=True)
        return made

    # The float classes name and count their arguments differently; all take the input first.
    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The float layer's forward between the activation quantizers."""
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        y = super().forward(x, *args, **kwargs)
        return y if self.output_quantizer is None else self.output_quantizer(y)


class QuantLinear(QuantizedLayer, nn.Linear):  # type: ignore[misc]
    """A quantized ``nn.Linear``. Input ``[…, I]``, output ``[…, O]``."""


class QuantConv2d(QuantizedLayer, nn.Conv2d):  # type: ignore[misc]
    """A quantized ``nn.Conv2d``."""


class QuantConvTranspose2d(QuantizedLayer, nn.ConvTranspose2d):  # type: ignore[misc]
    """A quantized ``nn.ConvTranspose2d``; axis 0 of its weight is the input channels, as torch lays it out."""


class QuantEmbedding(QuantizedLayer, nn.Embedding):  # type: ignore[misc]
    """A quantized ``nn.Embedding``; only its weight can be quantized, its input being indices."""


class QuantEmbeddingBag(QuantizedLayer, nn.EmbeddingBag):  # type: ignore[misc]
    """A quantized ``nn.EmbeddingBag``; only its weight can be quantized."""


QUANTIZED_TYPES: dict[type[nn.Module], type[QuantizedLayer]] = {
    nn.Linear: QuantLinear,
    nn.Conv2d: QuantConv2d,
    nn.ConvTranspose2d: QuantConvTranspose2d,
    nn.Embedding: QuantEmbedding,
    nn.EmbeddingBag: QuantEmbeddingBag,
}
"""Float class → quantized class; matched by exact type, since a subclass may compute something else."""

LOOKUP_TYPES: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)
"""Layers whose input is indices: quantized only where a pattern or a type names them, never by the global configuration."""


def is_quantized(module: nn.Module) -> bool:
    """Whether this very module is a quantized layer."""
    return isinstance(module, QuantizedLayer)
