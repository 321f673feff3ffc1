"""Converts tensor specs to ``QuantizationArgs`` of compressed-tensors, and back.

Source: compressed-tensors 0.20, ``quantization/quant_args.py``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from quark.config.enums import ZeroPointType
from quark.config.fields import value_of
from quark.config.layer import QLayerConfig, TensorSpec
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnsupportedError
from quark.numbers import canonicalize
from quark_exporters.stored_codes import qscheme_of, runs_along_rows, spec_of_layout

__all__ = ["arguments_of", "format_of", "group_of", "layer_config", "refuse_other_transforms", "spec_of"]

_INTEGERS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
_STRATEGIES = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group", "per_block": "block"}
_QSCHEMES = {strategy: qscheme for qscheme, strategy in _STRATEGIES.items()} | {"token": "per_channel", "tensor_group": "per_group"}
_FP4_GROUPS = {"group": 32, "tensor_group": 16}
"""Maps the strategy of FP4 weights to their group size: 32 for MXFP4 and 16 for NVFP4."""

_READ = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
_ENDLESS = re.compile(r"[*+}][^()]*\)[*+{]")
"""Finds nested repetitions in a regular expression. With them, a match can take exponential time."""


def arguments_of(spec: TensorSpec, *, activation: bool) -> dict[str, Any]:
    """Return the ``QuantizationArgs`` of compressed-tensors for a tensor spec.

    Args:
        spec: Spec of a weight or an input.
        activation: Whether the spec is for an input.

    Raises:
        UnsupportedError: compressed-tensors cannot express the spec. The message gives the reason, but names
            no layer.
    """
    specs = canonicalize(spec)
    first, names = specs[0], " → ".join(level.dtype.name for level in specs)
    if runs_along_rows(first):
        raise UnsupportedError("compressed-tensors groups input channels, not output channels (ch_axis=0)")
    if first.dtype.name == "fp4":
        return _fp4_arguments(specs, names)
    if len(specs) > 1 or first.dtype.name not in (*_INTEGERS, "fp8_e4m3"):
        raise UnsupportedError(f"compressed-tensors has no format for {names}")
    if first.scale_format not in (None, "float32"):
        raise UnsupportedError(f"compressed-tensors stores scales of {names} as floating-point numbers, not {first.scale_format}")
    if first.zero_point_type is ZeroPointType.float32 and first.symmetric is False:
        raise UnsupportedError("compressed-tensors has integer zero points, not real ones (zero_point_type=float32)")
    is_integer = first.dtype.name in _INTEGERS
    if not first.symmetric and (not is_integer or (activation and not first.is_dynamic)):
        raise UnsupportedError(
            f"compressed-tensors stores no zero points of {'static inputs' if is_integer else names}. Set symmetric=True"
        )
    if first.symmetric and first.dtype.name.startswith("u"):
        raise UnsupportedError(f"compressed-tensors cannot store unsigned codes without zero points ({names} with symmetric=True)")
    return {
        "num_bits": _INTEGERS.get(first.dtype.name, 8),
        "type": "int" if is_integer else "float",
        "symmetric": bool(first.symmetric),
        "dynamic": bool(first.is_dynamic),
        **_strategy_of(first, activation=activation),
    }


def _strategy_of(spec: QTensorConfig, *, activation: bool) -> dict[str, Any]:
    qscheme = qscheme_of(spec)
    if qscheme == "per_channel" and (activation or spec.ch_axis not in (0, -2)):
        if activation and spec.is_dynamic and spec.ch_axis in (1, -2):
            return {"strategy": "token"}
        raise UnsupportedError(
            f"compressed-tensors has no scales per channel of axis {spec.ch_axis} for {'inputs' if activation else 'weights'}"
        )
    if qscheme not in _STRATEGIES:
        raise UnsupportedError(f"compressed-tensors has no strategy for the qscheme {qscheme}")
    strategy: dict[str, Any] = {"strategy": _STRATEGIES[qscheme]}
    if qscheme == "per_group":
        return {"strategy": "channel"} if spec.group_size == -1 and not activation else strategy | {"group_size": spec.group_size}
    return strategy if spec.block_size is None else strategy | {"block_structure": list(spec.block_size)}


def _fp4_arguments(specs: tuple[QTensorConfig, ...], names: str) -> dict[str, Any]:
    """Return the ``QuantizationArgs`` of an FP4 spec, which must be MXFP4 or NVFP4."""
    first = specs[0]
    shared = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": first.group_size}
    if len(specs) == 1 and (first.scale_format, first.group_size) == ("e8m0", 32):
        return {**shared, "strategy": "group", "dynamic": bool(first.is_dynamic), "scale_dtype": "torch.uint8"}
    if len(specs) == 2 and (specs[1].dtype.name, first.group_size) == ("fp8_e4m3", 16) and not specs[1].is_dynamic:
        return {
            **shared,
            "strategy": "tensor_group",
            "dynamic": "local" if first.is_dynamic else False,
            "scale_dtype": "torch.float8_e4m3fn",
        }
    scales = specs[1].dtype.name if len(specs) > 1 else first.scale_format
    raise UnsupportedError(
        f"compressed-tensors stores FP4 in groups of 32 with E8M0 scales (MXFP4), or in groups of 16 with E4M3 scales and one scale of "
        f"the tensor (NVFP4), but {names} is in groups of {first.group_size} with scales in {scales}"
    )


def format_of(config: QLayerConfig) -> str:
    """Return the name of the format in which compressed-tensors stores the weight of a layer.

    Raises:
        UnsupportedError: compressed-tensors has no format for the specs of this weight and this input.
    """
    if config.weight is None:
        raise UnsupportedError("its input is quantized and its weight is not")
    weight = arguments_of(config.weight, activation=False)
    inputs = None if config.input_tensors is None else arguments_of(config.input_tensors, activation=True)
    if weight["dynamic"]:
        raise UnsupportedError("its weight has dynamic scales")
    if weight["type"] == "float" and weight["num_bits"] == 4:
        is_nvfp4 = weight["strategy"] == "tensor_group"
        if inputs is not None and (inputs["num_bits"], inputs["strategy"]) != (4, weight["strategy"]):
            kind = "NVFP4" if is_nvfp4 else "MXFP4"
            raise UnsupportedError(f"with weights in {kind}, inputs must be in {kind} or in floating point, not {_named(inputs)}")
        return "nvfp4-pack-quantized" if is_nvfp4 else "mxfp4-pack-quantized"
    if inputs is not None and inputs["type"] != weight["type"]:
        raise UnsupportedError(f"compressed-tensors has no format for weights of {_named(weight)} with inputs of {_named(inputs)}")
    if weight["type"] == "float":
        return "float-quantized"
    if inputs is not None:
        return "int-quantized"
    if weight["strategy"] in ("tensor", "block"):
        raise UnsupportedError(f"packed integers need one scale for each group or channel, not one for the {weight['strategy']}")
    return "pack-quantized"


def _named(arguments: Mapping[str, Any]) -> str:
    return f"{arguments['type']}{arguments['num_bits']} ({arguments['strategy']})"


def spec_of(arguments: Mapping[str, Any], *, activation: bool) -> TensorSpec:
    """Return the tensor spec that ``QuantizationArgs`` of compressed-tensors describe.

    Raises:
        ConfigError: A value has the wrong type.
        UnsupportedError: No installed number format has such codes.
    """
    bits, kind = value_of(arguments, "num_bits", int, 8), value_of(arguments, "type", str, "int")
    symmetric, dynamic = value_of(arguments, "symmetric", bool, True), bool(arguments.get("dynamic"))
    size, block = arguments.get("group_size"), arguments.get("block_structure")
    strategy = arguments.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in _QSCHEMES:
        raise UnsupportedError(f"quark does not read the strategy {strategy!r} of compressed-tensors")
    if (kind, bits) == ("float", 4):
        return _fp4_spec(strategy, size, is_dynamic=dynamic)
    names = {("float", 8): "fp8_e4m3", ("int", bits): f"{'' if symmetric else 'u'}int{bits}"}
    if (kind, bits) not in names or (kind == "int" and bits not in (4, 8)):
        raise UnsupportedError(f"quark does not read {bits}-bit codes of the type {kind!r} of compressed-tensors")
    qscheme = _QSCHEMES[strategy]
    if qscheme == "per_group" and (not isinstance(size, int) or size < 1):
        raise ConfigError(f"quantization_config says group_size={size!r} for the strategy {strategy!r}. Write a positive integer")
    return spec_of_layout(
        names[kind, bits],
        qscheme,
        is_dynamic=dynamic,
        symmetric=symmetric,
        ch_axis={"token": 1, "channel": 0, "group": -1}.get(strategy),
        group_size=size if qscheme == "per_group" else None,
        block_size=block if strategy == "block" else None,
        zero_point_type="int32",
    )


def _fp4_spec(strategy: str, size: object, *, is_dynamic: bool) -> TensorSpec:
    if _FP4_GROUPS.get(strategy) != size:
        raise UnsupportedError(
            f"quark reads FP4 of compressed-tensors as MXFP4 or NVFP4, not with strategy={strategy!r}, group_size={size!r}"
        )
    settings = {"symmetric": None, "ch_axis": -1, "group_size": size, "is_dynamic": is_dynamic, "zero_point_type": "int32"}
    settings["observer_cls"] = "PerBlockMXObserver"
    if strategy == "group":
        return spec_of_layout("fp4", "per_group", **settings, scale_format="e8m0", scale_calculation_mode="even")
    elements = spec_of_layout("fp4", "per_group", **settings, scale_type="float32", scale_format="float32")
    scales = spec_of_layout("fp8_e4m3", "per_tensor", is_scale_quant=True, zero_point_type="int32", scale_type="float32")
    return [elements, scales]


def refuse_other_transforms(block: Mapping[str, Any]) -> None:
    """Raise an error if quark cannot read the format, the sparsity or the transforms of a checkpoint.

    Raises:
        UnsupportedError: quark cannot read the checkpoint. The message says which of the three is the reason.
    """
    groups = value_of(block, "config_groups", Mapping, {})
    formats = {block.get("format"), *(group.get("format") for group in groups.values() if isinstance(group, Mapping))} - {None}
    if others := sorted(str(name) for name in formats if name not in _READ):
        raise UnsupportedError(
            f"quark does not read the format '{others[0]}' of compressed-tensors, only {', '.join(_READ)}. Use the float checkpoint"
        )
    sparsity = value_of(block, "sparsity_config", Mapping, {}).get("format")
    if sparsity not in (None, "dense"):
        raise UnsupportedError(f"quark does not read sparse checkpoints ('{sparsity}'). Use the float checkpoint")
    if value_of(block, "transform_config", Mapping, {}).get("config_groups"):
        raise UnsupportedError(
            "transforms run with this model (transform_config), so its weights differ from the float model. Use the float checkpoint"
        )


def group_of(block: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """Return the entry of ``config_groups`` that says how the weight of a layer is quantized.

    The function prefers an entry whose targets name the layer to an entry whose targets name a type of layer.

    Args:
        block: The ``quantization_config``.
        layer: Full name of a quantized layer.

    Raises:
        ConfigError: No entry targets the layer, or a value has the wrong type.
    """
    groups = [group for group in value_of(block, "config_groups", Mapping, {}).values() if isinstance(group, Mapping)]
    named = [group for group in groups if any(_names(str(target), layer) for target in value_of(group, "targets", list, []))]
    by_type = [group for group in groups if any(str(target).isidentifier() for target in value_of(group, "targets", list, []))]
    group = next((group for group in (*named, *by_type) if isinstance(group.get("weights"), Mapping)), None)
    if group is None:
        raise ConfigError(f"'{layer}' has scales, but no group of quantization_config targets it. The checkpoint is damaged")
    return group


def _names(target: str, layer: str) -> bool:
    """Return whether ``target`` is the name ``layer``, or a regular expression that matches this name."""
    if not target.startswith("re:"):
        return target == layer
    if _ENDLESS.search(target):
        raise ConfigError(f"the target {target!r} of quantization_config may take forever to match. Write it without nested repetitions")
    try:
        return re.match(target[3:], layer) is not None
    except re.error as error:
        raise ConfigError(f"the target {target!r} of quantization_config is not a regular expression ({error})") from error


def layer_config(block: Mapping[str, Any], name: str, stored: Container[str]) -> QLayerConfig:
    """Return how the weight and the input of a layer of a checkpoint are quantized.

    Args:
        block: The ``quantization_config``.
        name: Full name of a layer with codes.
        stored: Names of the tensors in the checkpoint.

    Raises:
        ConfigError: No entry targets the layer, or a value has the wrong type.
        UnsupportedError: quark cannot read the quantization of the layer.
    """
    if f"{name}.weight_g_idx" in stored:
        raise UnsupportedError(
            f"the columns of '{name}' are grouped by activation (weight_g_idx). Use this checkpoint only as a source of quark quantize"
        )
    group = group_of(block, name)
    inputs = value_of(group, "input_activations", Mapping)
    config = QLayerConfig(
        weight=spec_of(group["weights"], activation=False),
        input_tensors=None if inputs is None else spec_of(inputs, activation=True),
    )
    expected, said = format_of(config), group.get("format") or block.get("format")
    if said not in (expected, "naive-quantized"):
        raise UnsupportedError(f"'{name}' is stored in the format {said!r} of compressed-tensors, but its scheme needs {expected!r}")
    return config
