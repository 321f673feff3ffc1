"""The classes of quantized layers. Such a layer has a rounded weight, and fake-quantizes its inputs and
outputs.

The class of a quantized layer derives from the class of the float layer. Quantized convolutions are in
`quark.models.layers.convolutions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from quark.config.layer import ACTIVATIONS, PARAMETERS, QLayerConfig, Slot, TensorSpec
from quark.errors import ConfigError
from quark.models.layers.layer_types import LayerShape, is_transposed, layer_type_of
from quark.models.layers.quantizer_module import QuantizerModule
from quark.numbers import TensorQuantizer, quantizer_for

_M = TypeVar("_M", bound=nn.Module)
BRANCH = "branch"
"""Name of the submodule of a quantized layer that is its `Branch`. Checkpoints use the same name."""


class Branch(nn.Module, ABC):
    """The base class of branches of quantized layers.

    A branch computes a tensor from the input of the layer, and the layer adds this tensor to its own output.
    All tensors of a branch must be parameters or persistent buffers. In a checkpoint, the name of such a
    tensor is the name of the layer followed by ``.branch.<name>``.
    """

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor that the layer adds to its output.

        ``x`` is the float input of the layer, with the shape ``[…, in]``. The result has the shape ``[…,
        out]``.
        """

    def rest(self, x: Tensor) -> Tensor:
        """Return the part of the input that the layer quantizes and multiplies by its own weight.

        By default, the result is ``x``. A branch may multiply some channels in float, for instance channels
        with outliers. This method must then remove these channels from the input, and
        `quark.algorithms.Branching.weight_to_round` must remove them from the weight. Static scales and
        statistics are computed from the whole input.
        """
        return x


class QuantizedLayer(nn.Module):
    """The base class of quantized layers.

    Each quantized class derives from this class and from a float class.

    ``weight`` and ``bias`` have the dtype of the model, and their values are on the grids of their
    quantizers. So the layer can use the ``forward`` of the float class, and the codes can be computed from
    the values exactly. A weight that is exported without being used in a forward pass may still be float
    (`QuantizerModule.is_deferred`).

    Attributes:
        layer_config: The configuration with the spec of each tensor of the layer.
        planned_as: The class that plans and algorithms use for the layer. It is ``nn.Linear`` for all linear
            layers.
        weight_quantizer, bias_quantizer: The quantizers with the scales of the parameters. They are None for
            parameters that stay float.
        input_quantizer, output_quantizer: The quantizers that run in each forward pass. They are None for
            activations that stay float.
    """

    layer_config: QLayerConfig
    planned_as: type[nn.Module] | None
    weight_quantizer: QuantizerModule | None
    bias_quantizer: QuantizerModule | None
    input_quantizer: QuantizerModule | None
    output_quantizer: QuantizerModule | None

    @classmethod
    def from_float(cls, layer: nn.Module, config: QLayerConfig) -> Self:
        """Return a quantized layer that shares the parameters, hooks and settings of ``layer``.

        The values of the parameters are not rounded yet.
        """
        quantized = copied(layer, cls)
        quantized.layer_config = config
        quantized.planned_as = counts_as(layer)
        has_bias = getattr(layer, "bias", None) is not None
        shape = LayerShape.of(layer)
        for slot in (*PARAMETERS, *ACTIVATIONS):
            spec = getattr(config, slot) if slot is not Slot.bias or has_bias else None
            module = None
            if spec is not None:
                quantizer = cls.quantizer_of(slot, spec, shape)
                module = QuantizerModule(spec, activation=slot.is_activation, quantizer=quantizer).train(layer.training)
            setattr(quantized, slot.quantizer_attribute, module)
        return quantized

    @classmethod
    def quantizer_of(cls, slot: Slot, spec: TensorSpec, shape: LayerShape) -> TensorQuantizer:
        """Return the quantizer of one tensor of a layer.

        The default implementation is for linear layers. The first axis of the weight is the output channels,
        the last axis of the weight is the input channels, and the last axis of activations is the features. A
        layer type with another layout must override this method and return quantizers that rearrange the
        tensor (`quark.numbers.viewed`).

        Args:
            slot: The role of the tensor in the layer.
            spec: The quantization of the tensor.
            shape: The shapes of the tensors of the layer.
        """
        return quantizer_for(spec, activation=slot.is_activation)

    def other_state(self) -> dict[str, Tensor]:
        """Return the tensors of the state dict that are never quantized. The keys are their names.

        These are all parameters and persistent buffers except the weight, the bias and the buffers of
        quantizers.
        """
        quantizers = tuple(f"{slot.quantizer_attribute}." for slot in Slot)
        state: dict[str, Tensor] = self.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if name not in PARAMETERS and not name.startswith(quantizers)}

    @staticmethod
    def as_stored(matrix: Tensor) -> Tensor:
        """Return a view of a weight or of codes in the layout that checkpoints of the float class use.

        If ``matrix`` is in the layout of checkpoints, the result is in the layout of the quantized class. The
        default implementation returns ``matrix``, because both layouts are ``[out, in, …]``.
        """
        return matrix

    # The float classes differ in the names and the number of their arguments, but the first one is always the
    # input.
    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer. The configuration decides which activations are quantized."""
        y = self.with_branch(x, *args, **kwargs)
        return y if self.output_quantizer is None else self.output_quantizer(y)

    def with_branch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer without output quantization.

        The result is the sum of the results of `product` and of the branch.
        """
        if (branch := self.branch) is None:
            return self.product(x, *args, **kwargs)
        y = self.product(branch.rest(x), *args, **kwargs)
        return y + branch(x).to(y.dtype)

    @property
    def branch(self) -> Branch | None:
        """The branch of the layer, or None if the layer has no branch."""
        branch = self._modules.get(BRANCH)
        return branch if isinstance(branch, Branch) else None

    def product(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the product of the quantized input and the rounded weight, plus the bias."""
        return super().forward(x if self.input_quantizer is None else self.input_quantizer(x), *args, **kwargs)


class QuantLinear(QuantizedLayer, nn.Linear):  # type: ignore[misc]
    """A quantized ``nn.Linear``. Its input has the shape ``[…, in]``, and its output ``[…, out]``."""


class QuantConv1D(QuantLinear):
    """A quantized linear layer whose float class stores its weight as ``[in, out]``.

    An example of such a float class is ``Conv1D`` of transformers. In the quantized layer, the weight is a
    view of the float weight with the shape ``[out, in]``, so channels and groups have the same axes as in
    other linear layers. In a checkpoint, the weight or its codes have the layout ``[in, out]``, and scales
    have the same layout as for other linear layers. The reason is that runtimes transpose every tensor
    ``weight`` of such models, but no scales. Source: ``vllm.model_executor.models.gpt2``.
    """

    @classmethod
    def from_float(cls, layer: nn.Module, config: QLayerConfig) -> Self:
        """Do as `QuantizedLayer.from_float` says. The new weight is a transposed view of the float weight."""
        quantized = super().from_float(layer, config)
        weight = linear_weight(layer)
        quantized._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        quantized.out_features, quantized.in_features = weight.shape
        return quantized

    @staticmethod
    def as_stored(matrix: Tensor) -> Tensor:
        """Return the transposed matrix. This converts between the layouts ``[out, in]`` and ``[in, out]``.

        A tensor that does not have two axes is returned unchanged.
        """
        return matrix.t() if matrix.ndim == 2 else matrix

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.as_stored(destination[f"{prefix}weight"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        name = f"{prefix}weight"
        own = {**state_dict, name: self.as_stored(state_dict[name])} if name in state_dict else state_dict
        super()._load_from_state_dict(own, prefix, *args)


class QuantEmbedding(QuantizedLayer, nn.Embedding):  # type: ignore[misc]
    """A quantized ``nn.Embedding``. Axis 0 of its weight is the tokens.

    The input consists of indices, which are not quantized.
    """


@lru_cache(maxsize=256)
def _scaled_embedding(kind: type[nn.Embedding]) -> type[QuantEmbedding]:
    """Return the quantized class of an embedding class that multiplies its output by a constant."""
    return type(f"Quant{kind.__name__}", (QuantEmbedding, kind), {"__doc__": QuantEmbedding.__doc__, "__reduce__": _scaled_reduced})


def _scaled_reduced(layer: nn.Module) -> tuple[Any, ...]:
    """Return the result of ``__reduce__`` for ``layer``, whose class `_scaled_embedding` has created."""
    # The class is created on demand, so no module exports it.
    return _bare_scaled, (type(layer).__bases__[1],), layer.__dict__


def _bare_scaled(kind: type[nn.Embedding]) -> QuantEmbedding:
    """Return an instance of the quantized class of ``kind``, without attributes."""
    quantized = _scaled_embedding(kind)  # type: ignore[arg-type]  # classes are hashed by identity
    return quantized.__new__(quantized)


class QuantEmbeddingBag(QuantizedLayer, nn.EmbeddingBag):  # type: ignore[misc]
    """A quantized ``nn.EmbeddingBag``. Axis 0 of its weight is the tokens.

    The input consists of indices, which are not quantized.
    """


def copied(module: nn.Module, kind: type[_M]) -> _M:
    """Return an instance of ``kind`` that shares the tensors, submodules and settings of ``module``."""
    copy = kind.__new__(kind)
    # The copy gets dictionaries of its own for parameters, buffers and submodules, so that callers can change
    # them.
    copy.__dict__.update({k: dict(v) if type(v) is dict else v for k, v in module.__dict__.items()})
    return copy


def counts_as(layer: nn.Module) -> type[nn.Module] | None:
    """Return the class that plans use for a float layer, or None if the layer has no registered type."""
    layer_type = layer_type_of(layer)
    return None if layer_type is None else layer_type.planned_as


def quantized_class(layer: nn.Module) -> type[QuantizedLayer]:
    """Return the quantized class of a float layer.

    Raises:
        ConfigError: (a ValueError) No layer type is registered for the layer.
        PluginError: The class that is registered for the layer is not a `QuantizedLayer`.
    """
    layer_type, kind = layer_type_of(layer), type(layer)
    if layer_type is None:
        raise ConfigError(
            f"no layer type is registered for a {type(layer).__name__}. Register one in a plugin, with the hook quark_register_layer_types"
        )
    is_scaled = layer_type.quantized is QuantEmbedding and kind.forward is not nn.Embedding.forward
    return _scaled_embedding(kind) if is_scaled else layer_type.quantized  # type: ignore[arg-type]  # classes are hashed by identity


def linear_weight(layer: nn.Module) -> Tensor:
    """Return a view of a float layer's weight in the layout of its quantized class.

    For a linear layer, this layout is ``[out, in]``, whatever layout the float class uses. A weight that does
    not have two axes, such as the weight of a convolution, keeps the layout of the float class.
    """
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.detach().t() if weight.ndim == 2 and is_transposed(layer) else weight


def share_codes(layer: QuantizedLayer, source: QuantizedLayer) -> None:
    """Make ``layer`` use the weight of ``source``. Both layers then share the parameter, codes and scales."""
    layer.register_parameter("weight", source.weight)  # type: ignore[arg-type]
    layer.weight_quantizer = source.weight_quantizer


def held_weight(layer: Any) -> tuple[Tensor | None, nn.Module | None]:
    """Return the tensor that stores the weight of ``layer``, and the weight quantizer of ``layer``.

    If the layer runs from codes, the tensor is the one with the codes. If two layers share a weight, this
    function returns the same objects for both layers. It also works while a checkpoint is loaded.
    """
    held: Tensor | None = layer.held_codes() if hasattr(layer, "held_codes") else layer._parameters.get("weight")
    return held, getattr(layer, "weight_quantizer", None)


def have_same_weight(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two layers share one weight tensor, and for a quantized weight also the scales."""
    (weight, scales), (other_weight, other_scales) = held_weight(one), held_weight(other)
    return weight is not None and weight is other_weight and scales is other_scales


def is_quantized(module: nn.Module) -> bool:
    """Return whether ``module`` itself is a quantized layer. Its submodules do not matter."""
    return isinstance(module, QuantizedLayer)
