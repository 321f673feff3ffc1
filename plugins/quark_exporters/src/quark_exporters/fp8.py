"""The exporter, the reader and the dequantizer for DeepSeek-V3's layout of FP8 weights.

A weight has O output channels and I input channels.

=====================  ========================================================================
tensor                 contents
=====================  ========================================================================
``weight``             E4M3 codes ``[O, I]``
``weight_scale``       float32 ``[]``, multiplies the codes if the weight has one scale
``weight_scale_inv``   float32 ``[O / rows, I / columns]``, one per block; multiplies the
                       codes, although the name says the inverse
``input_scale``        float32 ``[]``, the scale of a statically quantized input
=====================  ========================================================================

Source: ``vllm/model_executor/layers/quantization/fp8.py`` of vLLM 0.32; ``FineGrainedFP8Config`` of
transformers 5.

The dequantizer reads more layouts: E4M3 or E5M2 codes with a scale for each tensor, row or block (128 x 128
in DeepSeek-V3). The scales are stored as ``<weight>_scale_inv`` or ``<weight>_scale``. In both cases, the
codes are multiplied by the scales. Source: checkpoints of DeepSeek-V3 and Qwen3-FP8; ``FineGrainedFP8Config``
and ``FbgemmFp8Config`` of transformers 5; vLLM's ``fp8.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.base.log import get_logger
from quark.checkpoint import CheckpointContent, CodedLayer, ExportOptions, FloatTensor, LayerCodes
from quark.checkpoint.layer_storage import layer_codes, meta_tensors
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import CheckpointError, ConfigError, UnsupportedError
from quark.numbers import QParams, canonicalize
from quark_exporters.linear_layers import LinearExporter, LinearReader, cache_scales, coded_rows, float_names, refuse_others
from quark_exporters.stored_codes import ScaleBlocks, qscheme_of, spec_of_layout, weight_quantizer

__all__ = ["Fp8Dequantizer", "Fp8Exporter", "Fp8Reader", "Fp8Storage"]


class Fp8Storage:
    """The `quark.checkpoint.LayerStorage` for layers with FP8 weights."""

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        """Return why the layout cannot store a layer (see `quark.checkpoint.LayerStorage.why_not`)."""
        if config.weight is None or config.input_tensors is None:
            return "it needs quantized weights and inputs, but the weight or the input is float"
        weights, inputs = canonicalize(config.weight), canonicalize(config.input_tensors)
        names = " → ".join(level.dtype.name for level in (*weights, *inputs))
        if not all(_is_plain(levels) for levels in (weights, inputs)):
            return f"it can store FP8 (E4M3) weights and inputs without zero points and with floating-point scales, not {names}"
        if qscheme_of(weights[0]) not in ("per_tensor", "per_block") or weights[0].is_dynamic:
            return f"it can store one static scale for each weight or for each block of a weight, not {qscheme_of(weights[0])}"
        if _activation_scheme(config) is None:
            wanted = "static with one scale, or dynamic with one for each token"
            block = _block_size_of(config)
            if block is not None:
                wanted = f"dynamic in groups of {block[1]}, as many as a block has columns"
            return (
                f"inputs of such weights must be {wanted}, not {qscheme_of(inputs[0])}, {'dynamic' if inputs[0].is_dynamic else 'static'}"
            )
        return None

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        """Return the tensors to store for a layer (see `quark.checkpoint.LayerStorage.stored`)."""
        own = weight_quantizer(layer.config).pack(layer.codes, layer.qparams)
        tensors = {"weight": own[""], _scale_name(layer.config): own["scale"].float()}
        return tensors if layer.input is None else {**tensors, "input_scale": layer.input.scale.float()}

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        """Return the layer that stored tensors describe (see `quark.checkpoint.LayerStorage.restored`)."""
        quantizer, scale = weight_quantizer(config), tensors[_scale_name(config)].float()
        own = {"": tensors["weight"], "scale": scale.reshape(quantizer.granularity.scale_shape(shape))}
        codes, qparams = quantizer.unpack(own, shape)
        return CodedLayer(config, codes, qparams, QParams(tensors["input_scale"].float()) if "input_scale" in tensors else None)


def _block_size_of(config: QLayerConfig) -> tuple[int, int] | None:
    """Return the number of rows and columns in a block of the weight, or None if the weight has one scale."""
    assert config.weight is not None
    return canonicalize(config.weight)[0].block_size


def _activation_scheme(config: QLayerConfig) -> str | None:
    """Return how readers of the layout quantize the input of a layer: ``"static"`` or ``"dynamic"``.

    Return None if no reader can quantize the input as ``config`` says.
    """
    assert config.input_tensors is not None
    inputs, block = canonicalize(config.input_tensors)[0], _block_size_of(config)
    if block is not None:
        in_groups = (qscheme_of(inputs), inputs.group_size, bool(inputs.is_dynamic)) == ("per_group", block[1], True)
        return "dynamic" if in_groups else None
    if inputs.is_dynamic:
        return "dynamic" if qscheme_of(inputs) == "per_channel" and inputs.ch_axis in (1, -2) else None
    return "static" if qscheme_of(inputs) == "per_tensor" else None


def _scale_name(config: QLayerConfig) -> str:
    return "weight_scale" if _block_size_of(config) is None else "weight_scale_inv"


def _is_plain(levels: tuple[QTensorConfig, ...]) -> bool:
    first = levels[0]
    return (len(levels), first.dtype.name, first.symmetric) == (1, "fp8_e4m3", True) and first.scale_format in (None, "float32")


def _block_size(block: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the number of rows and columns that share a scale, as the ``quantization_config`` states.

    Return None if the ``quantization_config`` has no block size.

    Raises:
        ConfigError: The block size is invalid.
    """
    size = block.get("weight_block_size")
    if size is None:
        return None
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size)):
        raise ConfigError(f"quantization_config says weight_block_size={size!r}. Write two positive integers, such as [128, 128]")
    return size[0], size[1]


_UE8M0 = {"scale_format": "e8m0", "scale_calculation_mode": "rceil", "observer_cls": "PerBlockMXObserver"}
"""The settings of input scales for the scale format of DeepSeek-V3.1.

Input scales are rounded up to powers of two. Weight scales are powers of two that are stored in float32.
"""


class Fp8Exporter(LinearExporter):
    """Writes FP8 weights that have one scale for the whole weight, or one scale for each block.

    `Fp8Reader` reads these weights.
    """

    layout = "fp8"
    storage = Fp8Storage()

    def reasons(self, content: CheckpointContent, options: ExportOptions) -> Iterator[tuple[str, str]]:
        """Yield why the layout cannot store the model (see `CheckpointExporter.reasons`)."""
        reasons = list(super().reasons(content, options))
        yield from reasons
        if not reasons and len(kinds := {(_activation_scheme(c), _block_size_of(c)) for c in coded_rows(content.plan).values()}) != 1:
            said = "; ".join(
                f"{scheme} inputs, {'one scale' if block is None else f'blocks of {block}'}" for scheme, block in sorted(kinds, key=str)
            )
            yield "", f"it needs the same scheme for all layers, but the layers have: {said or 'none'}"

    def warn(self, content: CheckpointContent, options: ExportOptions) -> None:
        """Warn if a weight has only one scale, because transformers ignores such a scale.

        transformers reads only scales of blocks.
        """
        if any(_block_size_of(config) is None for config in coded_rows(content.plan).values()):
            get_logger(__name__).warning(
                "transformers ignores weight_scale in checkpoints with quant_method 'fp8' and would compute with unscaled codes. vLLM "
                "and SGLang read weight_scale. For transformers, export as compressed_tensors"
            )

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        """Return the ``quantization_config`` to write (see `CheckpointExporter.quantization_config`)."""
        config, names = next(iter(coded_rows(content.plan).values())), float_names(content)
        block = _block_size_of(config)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": _activation_scheme(config),
            "weight_block_size": None if block is None else list(block),
            # The same list under two names: vLLM and SGLang read the first, transformers reads the second.
            "ignored_layers": names,
            "modules_to_not_convert": names,
            "kv_cache_scheme": "static" if any(row.states for row in content.plan.attentions) else None,
        }


class Fp8Reader(LinearReader):
    """Reads FP8 weights that have one scale for the whole weight, or one scale for each block."""

    storage = Fp8Storage()

    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """Return the quantized layers of the checkpoint (see `quark.checkpoint.StorageReader.layers`)."""
        config = self.layer_config(block)
        scales = (".weight_scale", ".weight_scale_inv")
        names = [name.removesuffix(suffix) for name in stored for suffix in scales if name.endswith(suffix)]
        return dict.fromkeys((name for name in names if f"{name}.weight" in stored), config)

    def layer_config(self, block: Mapping[str, Any]) -> QLayerConfig:
        """Return the quantization that ``block`` describes.

        See `quark.checkpoint.LayoutReader.layer_config`.

        Raises:
            UnsupportedError: quark can only dequantize the checkpoint, or no reader supports this combination
                of weights and inputs.
        """
        method, scheme, size = block.get("quant_method"), block.get("activation_scheme", "dynamic"), _block_size(block)
        scale_format = block.get("scale_fmt")
        if method != "fp8" or scale_format not in (None, "float", "ue8m0") or scheme not in ("static", "dynamic"):
            raise UnsupportedError(
                f"this checkpoint has quant_method={method!r}, activation_scheme={scheme!r} and scale_fmt={scale_format!r}, which quark "
                f"cannot load as a quantized model. Use the checkpoint only as a source of quark quantize"
            )
        if size is not None and scheme == "static":
            raise UnsupportedError("this checkpoint has FP8 blocks and static inputs, a combination that no reader of the layout supports")
        if size is not None:
            scales = _UE8M0 if scale_format == "ue8m0" else {}
            inputs = spec_of_layout("fp8_e4m3", "per_group", ch_axis=-1, group_size=size[1], is_dynamic=True, **scales)
            return QLayerConfig(weight=spec_of_layout("fp8_e4m3", "per_block", block_size=size), input_tensors=inputs)
        weight = spec_of_layout("fp8_e4m3", "per_tensor")
        is_static = scheme == "static"
        inputs = weight if is_static else spec_of_layout("fp8_e4m3", "per_channel", ch_axis=1, is_dynamic=True)
        return QLayerConfig(weight=weight, input_tensors=inputs)


_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = ("_scale_inv", "_scale")
_ACTIVATION_SCALES = ("input_scale", "input_scale_ub", "activation_scale", "output_scale")


class Fp8Dequantizer:
    """The `quark.checkpoint.Dequantizer` for FP8 checkpoints.

    A layer without scales is not quantized, and the dequantizer does not change its tensors.
    """

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """Yield the float tensors of the checkpoint (see `quark.checkpoint.Dequantizer.float_tensors`)."""
        size, config = _block_size(block), _config(block)
        for name, tensor in stored.items():
            scale = next((name + suffix for suffix in _SCALES if name + suffix in stored), None)
            if tensor.dtype in _CODES and scale is not None:
                one = _float_tensor(name, scale, size, stored)
                if config is not None and name.endswith(".weight"):
                    _refuse_others(one, config, stored, says_inputs="activation_scheme" in block)
                yield one if config is None else attrs.evolve(one, layers=_layers(one, config, stored))
            elif scale is not None and scale.endswith("_inv"):
                kind = str(tensor.dtype).removeprefix("torch.")
                raise CheckpointError(f"'{name}' is stored as {kind} but has FP8 scales in '{scale}'. The checkpoint is damaged")


def _config(block: Mapping[str, Any]) -> QLayerConfig | None:
    try:
        return Fp8Reader().layer_config(block)
    except UnsupportedError:
        return None  # quark dequantizes the weights and can keep no layer as it is stored


def _refuse_others(one: FloatTensor, config: QLayerConfig, stored: Mapping[str, Tensor], *, says_inputs: bool) -> None:
    """Raise CheckpointError if the stored tensors of a layer contradict the configuration of the layer.

    Some differences are allowed: codes in E5M2, one scale per row, input scales that the configuration does
    not mention, and an input scale with the older name ``activation_scale``.
    """
    layer, announced = one.name.removesuffix(".weight"), dict(meta_tensors(Fp8Storage(), config, one.shape))
    weight, scale = (stored[name] for name in one.sources)
    announced["weight"] = announced["weight"].to(weight.dtype)
    leaf = one.sources[1].removeprefix(f"{layer}.")
    if leaf in announced and (scale.numel() == one.shape[0] or leaf.endswith("_inv")):  # `ScaleBlocks` has checked the shape of the scales
        announced[leaf] = announced[leaf].new_empty(scale.shape)
    if not says_inputs or f"{layer}.activation_scale" in stored:
        announced.pop("input_scale", None)
    refuse_others(layer, stored, announced, may_be=() if says_inputs else ("input_scale",))


def _layers(one: FloatTensor, config: QLayerConfig, stored: Mapping[str, Tensor]) -> tuple[LayerCodes, ...]:
    """Return the stored codes of a layer, so that quark can use them instead of quantizing the layer again.

    Return an empty tuple if the stored tensors differ from what ``config`` describes.
    """
    layer, (weight, scale) = one.name.removesuffix(".weight"), one.sources
    is_plain = (
        stored[weight].dtype is torch.float8_e4m3fn and stored[scale].dtype in _SCALE_DTYPES and layer != one.name and len(one.shape) == 2
    )
    if not is_plain or (_block_size_of(config) is None and stored[scale].numel() != 1):
        return ()
    names = {"weight": weight, _scale_name(config): scale}
    inputs = next((name for name in one.left_out if name in (f"{layer}.input_scale", f"{layer}.activation_scale")), None)
    names |= {} if inputs is None else {"input_scale": inputs}
    return layer_codes(layer, config, one.shape, Fp8Storage(), names)


def _float_tensor(name: str, scale: str, size: tuple[int, int] | None, stored: Mapping[str, Tensor]) -> FloatTensor:
    blocks = ScaleBlocks.of(name, tuple(stored[name].shape), tuple(stored[scale].shape), size)
    stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
    return FloatTensor(
        name=name,
        shape=tuple(stored[name].shape),
        sources=(name, scale),
        make=lambda tensors, dtype: blocks.values(tensors[name], tensors[scale], None, dtype),
        left_out=(*(stem + suffix for suffix in _ACTIVATION_SCALES if stem + suffix in stored), *cache_scales(stem[:-1], stored)),
    )
