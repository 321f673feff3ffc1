"""Fp8Storage: tensors of a layer with FP8 weights as DeepSeek-V3, vLLM and transformers name them.

=====================  ==========================================================================================================
tensor                 contents
=====================  ==========================================================================================================
``weight``             E4M3 codes ``[O, I]``
``weight_scale``       float32 ``[]``, a factor, where the tensor has one scale
``weight_scale_inv``   float32 ``[O / rows, I / columns]``, factors of blocks, whatever the name says
``input_scale``        float32 ``[]``, of a static input
=====================  ==========================================================================================================

Source: ``vllm/model_executor/layers/quantization/fp8.py`` of vLLM 0.32; ``FineGrainedFP8Config`` of
transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quark.checkpoint import CodedLayer
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.numbers import QParams, canonicalize, quantizer_for

__all__ = ["Fp8Storage", "activation_scheme_of", "block_size_of"]


class Fp8Storage:
    """As `quark.checkpoint.LayerStorage`."""

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        """As `quark.checkpoint.LayerStorage.why_not`."""
        if config.weight is None or config.input_tensors is None:
            return "its weights and inputs are both quantized, and here one of them is float"
        weights, inputs = canonicalize(config.weight), canonicalize(config.input_tensors)
        names = " → ".join(level.dtype.name for level in (*weights, *inputs))
        if not all(_is_plain(levels) for levels in (weights, inputs)):
            return f"it holds FP8 (E4M3) weights and inputs without zero points, with scales in floating point, and not {names}"
        if _qscheme(weights[0]) not in ("per_tensor", "per_block") or weights[0].is_dynamic:
            return f"it has a scale for each weight, or for each block of one, and not {_qscheme(weights[0])}"
        if activation_scheme_of(config) is None:
            wanted = "static with one scale, or dynamic with one for each token"
            block = block_size_of(config)
            if block is not None:
                wanted = f"dynamic in groups of {block[1]}, the columns of its blocks"
            return f"inputs of such weights are {wanted}, and not {_qscheme(inputs[0])}, {'dynamic' if inputs[0].is_dynamic else 'static'}"
        return None

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        """As `quark.checkpoint.LayerStorage.stored`."""
        assert layer.config.weight is not None
        own = quantizer_for(layer.config.weight, activation=False).pack(layer.codes, layer.qparams)
        scale = "weight_scale" if block_size_of(layer.config) is None else "weight_scale_inv"
        tensors = {"weight": own[""], scale: own["scale"].float()}
        return tensors if layer.input is None else {**tensors, "input_scale": layer.input.scale.float()}

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        """As `quark.checkpoint.LayerStorage.restored`."""
        assert config.weight is not None
        quantizer = quantizer_for(config.weight, activation=False)
        scale = tensors["weight_scale" if block_size_of(config) is None else "weight_scale_inv"].float()
        own = {"": tensors["weight"], "scale": scale.reshape(quantizer.granularity.scale_shape(shape))}
        codes, qparams = quantizer.unpack(own, shape)
        return CodedLayer(config, codes, qparams, QParams(tensors["input_scale"].float()) if "input_scale" in tensors else None)


def block_size_of(config: QLayerConfig) -> tuple[int, int] | None:
    """Return rows and columns of the blocks of a weight; None where it has one scale."""
    assert config.weight is not None
    return canonicalize(config.weight)[0].block_size


def activation_scheme_of(config: QLayerConfig) -> str | None:
    """Return ``"static"`` or ``"dynamic"`` as readers of the layout quantize the input of a layer; None where they do not."""
    assert config.input_tensors is not None
    inputs, block = canonicalize(config.input_tensors)[0], block_size_of(config)
    if block is not None:
        in_groups = (_qscheme(inputs), inputs.group_size, bool(inputs.is_dynamic)) == ("per_group", block[1], True)
        return "dynamic" if in_groups else None
    if inputs.is_dynamic:
        return "dynamic" if _qscheme(inputs) == "per_channel" and inputs.ch_axis in (1, -2) else None
    return "static" if _qscheme(inputs) == "per_tensor" else None


def _qscheme(spec: QTensorConfig) -> str | None:
    return None if spec.qscheme is None else spec.qscheme.name


def _is_plain(levels: tuple[QTensorConfig, ...]) -> bool:
    first = levels[0]
    return (len(levels), first.dtype.name, first.symmetric) == (1, "fp8_e4m3", True) and first.scale_format in (None, "float32")
