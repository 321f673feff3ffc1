"""Quantized layers: the float layer's class, with a rounded weight and fake-quantized inputs and outputs.

Convolutions are in `quark.models.layers.convolutions`.
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
"""Name of the submodule of a quantized layer that is its `Branch`; also in checkpoints."""


class Branch(nn.Module, ABC):
    """Computes beside a quantized layer, from the same input; the layer adds the result to its output.

    All tensors are parameters or persistent buffers: checkpoints hold them as ``branch.<name>`` of the layer.
    """

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor to add to the layer's output, ``[…, out]``, from the layer's float input ``x
        [..., in]``."""

    def rest(self, x: Tensor) -> Tensor:
        """Return the input for the layer's own weight, by default ``x`` itself.

        A branch that multiplies some channels in float, such as outliers, removes them here from the input to
        quantize, and in `quark.algorithms.Branching.weight_to_round` from the weight to round. Static scales
        and statistics cover the whole input.
        """
        return x


class QuantizedLayer(nn.Module):
    """Base of quantized layers, which derive from it and from their float class.

    ``weight`` and ``bias`` hold values on the grid of their quantizers, in the model's dtype. So the float
    class's forward applies, and the codes can be recovered exactly. A weight that is only stored may still be
    float (`QuantizerModule.is_deferred`).

    Attributes:
        layer_config: The spec of each tensor.
        planned_as: The class of the layer for plans and algorithms: ``nn.Linear`` for all linear layers.
        weight_quantizer, bias_quantizer: Scales of the parameters; None if they stay float.
        input_quantizer, output_quantizer: Applied at each forward; None if activations stay float.
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

        No value is rounded yet.
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

        A linear layer has the output channels of a weight first, its input channels last, and the features of
        activations last. A layer type with another layout returns quantizers with a view
        (`quark.numbers.viewed`).

        Args:
            slot: The tensor.
            spec: Its quantization.
            shape: The shapes of the layer.
        """
        return quantizer_for(spec, activation=slot.is_activation)

    def other_state(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by name, except weight, bias and quantizer buffers.

        These tensors are never quantized.
        """
        quantizers = tuple(f"{slot.quantizer_attribute}." for slot in Slot)
        state: dict[str, Tensor] = self.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if name not in PARAMETERS and not name.startswith(quantizers)}

    @staticmethod
    def as_stored(matrix: Tensor) -> Tensor:
        """Convert a weight or codes to the layout of the float class's checkpoints, or back; return a view.

        By default, both layouts are ``[out, in, …]``.
        """
        return matrix

    # The float classes name and count their arguments differently; all take the input first.
    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the float layer's output for the quantized input, with the output quantized."""
        y = self.with_branch(x, *args, **kwargs)
        return y if self.output_quantizer is None else self.output_quantizer(y)

    def with_branch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output before the output quantizer: the product plus the output of the branch."""
        if (branch := self.branch) is None:
            return self.product(x, *args, **kwargs)
        y = self.product(branch.rest(x), *args, **kwargs)
        return y + branch(x).to(y.dtype)

    @property
    def branch(self) -> Branch | None:
        """The branch beside the layer; None without one."""
        branch = self._modules.get(BRANCH)
        return branch if isinstance(branch, Branch) else None

    def product(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the product of the quantized input and the rounded weight, and the bias."""
        return super().forward(x if self.input_quantizer is None else self.input_quantizer(x), *args, **kwargs)


class QuantLinear(QuantizedLayer, nn.Linear):  # type: ignore[misc]
    """A quantized ``nn.Linear``. Input ``[…, I]``, output ``[…, O]``."""


class QuantConv1D(QuantLinear):
    """A quantized linear layer whose float class stores its weight as ``[in, out]``.

    An example is ``Conv1D`` of transformers. The quantized layer's weight is ``[out, in]``, a view of the
    float weight, with the channels and groups of any linear layer. In a checkpoint, weight and codes are
    ``[in, out]``, because runtimes of such models transpose every ``weight`` and nothing else; scales have
    the layout of a linear layer. Source: ``vllm.model_executor.models.gpt2``.
    """

    @classmethod
    def from_float(cls, layer: nn.Module, config: QLayerConfig) -> Self:
        """Return a quantized layer that shares the storage of the weight of ``layer``.

        See `QuantizedLayer.from_float`.
        """
        quantized = super().from_float(layer, config)
        weight = linear_weight(layer)
        quantized._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        quantized.out_features, quantized.in_features = weight.shape
        return quantized

    @staticmethod
    def as_stored(matrix: Tensor) -> Tensor:
        """Return a matrix transposed, ``[out, in]`` to ``[in, out]`` or back.

        Tensors of other ranks are returned unchanged.
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
    """A quantized ``nn.Embedding``: channel 0 of its weight is the token.

    Its input is indices, which are not quantized.
    """


@lru_cache(maxsize=256)
def _scaled_embedding(kind: type[nn.Embedding]) -> type[QuantEmbedding]:
    """Return the quantized class of embeddings that multiply the rows by a constant."""
    return type(f"Quant{kind.__name__}", (QuantEmbedding, kind), {"__doc__": QuantEmbedding.__doc__, "__reduce__": _scaled_reduced})


def _scaled_reduced(layer: nn.Module) -> tuple[Any, ...]:
    # The class is created on demand, so there is no place from which it could be imported.
    return _bare_scaled, (type(layer).__bases__[1],), layer.__dict__


def _bare_scaled(kind: type[nn.Embedding]) -> QuantEmbedding:
    """Return a quantized embedding of that float class, without attributes."""
    quantized = _scaled_embedding(kind)  # type: ignore[arg-type]  # classes are hashed by identity
    return quantized.__new__(quantized)


class QuantEmbeddingBag(QuantizedLayer, nn.EmbeddingBag):  # type: ignore[misc]
    """A quantized ``nn.EmbeddingBag``: channel 0 of its weight is the token.

    Its input is indices, which are not quantized.
    """


def copied(module: nn.Module, kind: type[_M]) -> _M:
    """Return a module of that class that shares the tensors, submodules and settings of ``module``."""
    copy = kind.__new__(kind)
    # Dicts are the tables of parameters, buffers and submodules, which change in the copy.
    copy.__dict__.update({k: dict(v) if type(v) is dict else v for k, v in module.__dict__.items()})
    return copy


def counts_as(layer: nn.Module) -> type[nn.Module] | None:
    """Return the class of a float layer in plans, from its registered layer type; None if it has none."""
    layer_type = layer_type_of(layer)
    return None if layer_type is None else layer_type.planned_as


def quantized_class(layer: nn.Module) -> type[QuantizedLayer]:
    """Return the quantized class of a float layer for which `counts_as` is not None.

    Raises:
        ConfigError: (a ValueError) No layer type is registered for the layer.
        PluginError: The class that is registered for the layer is not a `QuantizedLayer`.
    """
    layer_type, kind = layer_type_of(layer), type(layer)
    if layer_type is None:
        raise ConfigError(f"no layer type is registered for a {type(layer).__name__}: see the hook quark_register_layer_types")
    is_scaled = layer_type.quantized is QuantEmbedding and kind.forward is not nn.Embedding.forward
    return _scaled_embedding(kind) if is_scaled else layer_type.quantized  # type: ignore[arg-type]  # classes are hashed by identity


def linear_weight(layer: nn.Module) -> Tensor:
    """Return a view of a float layer's weight in the layout of its quantized class.

    This is ``[out, in]`` for a linear layer, however it is stored. Weights of other ranks, such as in
    convolutions, keep the float class's layout.
    """
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.detach().t() if weight.ndim == 2 and is_transposed(layer) else weight


def share_codes(layer: QuantizedLayer, source: QuantizedLayer) -> None:
    """Give a quantized layer the weight of another one: the same parameter, codes and scales."""
    layer.register_parameter("weight", source.weight)  # type: ignore[arg-type]
    layer.weight_quantizer = source.weight_quantizer


def held_weight(layer: Any) -> tuple[Tensor | None, nn.Module | None]:
    """Return the tensor of a layer's weight (its codes if it runs from codes), and its weight quantizer.

    Two layers that share a weight return the same objects, also while a checkpoint is loaded.
    """
    held: Tensor | None = layer.held_codes() if hasattr(layer, "held_codes") else layer._parameters.get("weight")
    return held, getattr(layer, "weight_quantizer", None)


def have_same_weight(one: nn.Module, other: nn.Module) -> bool:
    """Return whether the weight of two layers is one tensor, with one set of scales if it is quantized."""
    (weight, scales), (other_weight, other_scales) = held_weight(one), held_weight(other)
    return weight is not None and weight is other_weight and scales is other_scales


def is_quantized(module: nn.Module) -> bool:
    """Return whether this module itself is a quantized layer."""
    return isinstance(module, QuantizedLayer)
