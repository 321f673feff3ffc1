"""Functions that describe the quantization of a tensor or layer in a few words, or count bits per element."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from quark.config.enums import QSchemeType, ScaleType
from quark.config.layer import QLayerConfig, TensorSpec, levels
from quark.config.tensor import QTensorConfig

_SCALE_BITS = {"e8m0": 8, "e4m3": 8, "e5m3": 8, "float32": 32}
_SCALE_TYPE_BITS = {
    ScaleType.float16: 16,
    ScaleType.bfloat16: 16,
    ScaleType.pof2: 8,
    ScaleType.float8_e5m3: 8,
    ScaleType.float8_e8m0fnu: 8,
}


def describe_spec(spec: TensorSpec | None) -> str:
    """Describe the quantization of a tensor in a few words, such as ``int4/group 128`` or ``float``."""
    return " + ".join(_describe_level(s) for s in levels(spec)) or "float"


def _describe_level(level: QTensorConfig) -> str:
    shapes = {
        QSchemeType.per_tensor: "tensor",
        QSchemeType.per_channel: f"channel {level.ch_axis}",
        QSchemeType.per_group: f"group {level.group_size}",
        QSchemeType.per_block: f"block {level.block_size}",
        None: f"block {level.group_size}" if level.group_size else "",
    }
    shape = shapes[level.qscheme] if level.qscheme in shapes else _describe_own_shape(level)
    asymmetric = " asym" if level.symmetric is False else ""
    scale = f" {level.scale_format}" if level.scale_format not in (None, "float32") else ""
    return f"{level.dtype.name}/{shape}{asymmetric}{scale}".rstrip("/")


def _describe_own_shape(level: QTensorConfig) -> str:
    """Describe a granularity that a number format defines. ``level`` has such a granularity.

    The text is the name of the granularity, followed by the group or block size, if ``level`` has a size.
    """
    assert level.qscheme is not None
    size = level.group_size if level.block_size is None else level.block_size
    return level.qscheme.name if size is None else f"{level.qscheme.name} {size}"


def describe_activation(spec: TensorSpec | None) -> str:
    """Describe the quantization of an activation in a few words, such as ``fp8_e4m3/tensor static``.

    The text is the result of `describe_spec`, followed by ``static`` or ``dynamic``.
    """
    if spec is None:
        return "float"
    first, last = levels(spec)[0], levels(spec)[-1]
    when = {True: " dynamic", False: " static", None: " dynamic" if first.group_size else ""}[first.is_dynamic]
    return f"{describe_spec(spec)}{when}{' under static' if first.is_dynamic and last.is_dynamic is False else ''}"


def describe_layer(layer: QLayerConfig | None) -> str:
    """Describe the quantization of a layer's weight, input, output and bias in a few words."""
    if layer is None:
        return "float"
    parts = [f"W {describe_spec(layer.weight)}"]
    activations = {"in": layer.input_tensors, "out": layer.output_tensors}
    parts += [f"{label} {describe_activation(spec)}" for label, spec in activations.items() if spec is not None]
    return ", ".join([*parts, *([f"bias {describe_spec(layer.bias)}"] if layer.bias is not None else [])])


def needs_calibration(layer: QLayerConfig) -> bool:
    """Return whether the layer has an activation with static ranges. Such ranges are calibrated on data.

    If an activation is only cast to another dtype, it has no scale and needs no data.
    """
    activations = (*levels(layer.input_tensors), *levels(layer.output_tensors))
    return any(level.is_dynamic is False and level.qscheme is not None for level in activations)


def effective_bits(spec: TensorSpec | None, bits_of: Callable[[str], float]) -> float | None:
    """Return the number of stored bits per element, including scales and zero points of groups and blocks.

    Scales of whole tensors and of channels are not included.

    Args:
        spec: Quantization of a tensor.
        bits_of: Function that returns the number of bits of one element. Its argument is the name of a number
            format.

    Returns:
        The number of bits, or None if the tensor is not quantized. For example, int4 with a float32 scale for
        each group of 128 elements has 4.25 bits.
    """
    all_levels = levels(spec)
    elements = [s for s in all_levels if not s.is_scale_quant]
    if not elements:
        return None
    scale_level = next((s for s in all_levels if s.is_scale_quant), None)
    total = bits_of(_format(elements[-1]))
    for level in elements:
        shared = _elements_per_scale(level)
        if shared is not None:
            scale = _scale_bits(level, bits_of) if scale_level is None else bits_of(_format(scale_level))
            zero = bits_of(_format(level)) if level.symmetric is False else 0
            total += (scale + zero) / shared
    return total


def _format(level: QTensorConfig) -> str:
    return (level.mx_element_dtype or level.dtype).name


def _scale_bits(level: QTensorConfig, bits_of: Callable[[str], float]) -> float:
    if level.scale_format is not None:
        return _SCALE_BITS.get(level.scale_format) or bits_of(level.scale_format)
    if level.qscheme is None:
        return 8  # the shared exponent of a block
    return 32 if level.scale_type is None else _SCALE_TYPE_BITS.get(level.scale_type, 32)


def _elements_per_scale(level: QTensorConfig) -> int | None:
    """Return the number of elements that share a scale.

    Return None if this number depends on the shape of the tensor.
    """
    if level.qscheme in (QSchemeType.per_tensor, QSchemeType.per_channel):
        return None
    if level.qscheme is not QSchemeType.per_block and level.group_size is not None:
        return level.group_size if level.group_size > 0 else None
    return prod(level.block_size) if level.block_size is not None else None
