"""`QuarkDequantizer` computes float weights from a checkpoint in the Quark layout.

The checkpoint may come from any tool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.base.log import get_logger
from quark.checkpoint import FloatTensor
from quark.checkpoint.provenance import refuse_unreadable
from quark.config.layer import PARAMETERS, QLayerConfig, Slot, TensorSpec
from quark.errors import CheckpointError, UnsupportedError
from quark.models.hf.missing_tensors import misfit
from quark.models.layers.coded_layer import packed_meta, packed_scales
from quark.models.plan.rules import layer_config_for
from quark.numbers import canonicalize, cast_finite, quantizer_for
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark_exporters.quark_layout.quantization_config import read_quantization_config

__all__ = ["QuarkDequantizer"]

_SCALES = tuple(f"{part}{level}" for part in ("scale", "zero_point") for level in ("", "_2", "_3"))
"""Suffixes in the names of the scales and zero points that a checkpoint stores beside codes."""


class QuarkDequantizer:
    """The `quark.checkpoint.Dequantizer` for the Quark layout."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """Yield the float tensors of the checkpoint (see `quark.checkpoint.Dequantizer.float_tensors`).

        Raises:
            UnsupportedError: The model has an algorithm that runs with it, so the weights differ from those
                of the float model.
        """
        parsed = read_quantization_config(block)
        refuse_unreadable(parsed.config)
        if names := parsed.config.run_time_algorithms:
            raise UnsupportedError(
                f"the algorithm {', '.join(names)} runs with the model of this checkpoint, so its weights differ from the float model. "
                f"Use the float checkpoint as the source"
            )
        get_logger(__name__).warning(
            "The source is quantized, so its rounding error remains, and a second rounding adds to this error. Use the float "
            "checkpoint as the source if you have it."
        )
        for name in stored:
            layer, _, leaf = name.rpartition(".")
            if leaf in PARAMETERS and any(f"{name}_{part}" in stored for part in _SCALES):
                config = layer_config_for(parsed.config, layer, torch.nn.Linear).config
                spec = None if config is None else getattr(config, leaf)
                if config is not None and spec is not None:
                    one = _float_tensor(name, spec, stored, parsed.pack_method, parsed.config.weight_format == "fake_quantized")
                    others = _scales_of_activations(layer, config, one.shape, stored) if leaf == "weight" else ()
                    yield attrs.evolve(one, left_out=(*one.left_out, *others))


def _float_tensor(name: str, spec: TensorSpec, stored: Mapping[str, Tensor], order: str, holds_values: bool) -> FloatTensor:
    quantizer = quantizer_for(spec, activation=False)
    shape = tuple(stored[name].shape) if holds_values else _float_shape(name, quantizer, stored, order)
    if error := quantizer.shape_error(shape):
        raise CheckpointError(f"'{name}' {list(shape)} cannot be a weight in its number format ({error}). The checkpoint is damaged")
    announced = packed_meta(quantizer, shape, order) | ({"": torch.empty(shape, device="meta")} if holds_values else {})
    _refuse_misfits({f"{name}_{suffix}" if suffix else name: tensor for suffix, tensor in announced.items()}, stored, spec)
    scales = [f"{name}_{suffix}" for suffix in announced if suffix and f"{name}_{suffix}" in stored]
    if holds_values:
        return FloatTensor(
            name=name, shape=shape, sources=(name,), make=lambda tensors, dtype: cast_finite(tensors[name], dtype), left_out=scales
        )
    # Zero points of symmetric codes are all 0. A checkpoint may leave them out.
    zeros = {suffix: t for suffix, t in announced.items() if suffix.startswith("zero_point") and f"{name}_{suffix}" not in stored}

    def make(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed = {suffix: torch.zeros_like(t, device=tensors[name].device) for suffix, t in zeros.items()}
        packed |= {"": tensors[name], **{scale.removeprefix(f"{name}_"): tensors[scale] for scale in scales}}
        codes, qparams = quantizer.unpack(packed, shape, order=order)
        return cast_finite(quantizer.dequantize(codes, qparams), dtype)

    return FloatTensor(name=name, shape=shape, sources=(name, *scales), make=make)


def _refuse_misfits(announced: Mapping[str, Tensor], stored: Mapping[str, Tensor], spec: TensorSpec) -> None:
    """Raise CheckpointError if ``stored`` lacks a tensor of ``announced``, or has another dtype or shape."""
    for name, wanted in announced.items():
        if name in stored and (error := misfit(stored[name], wanted)):
            raise CheckpointError(f"'{name}' {error}. The export is damaged or belongs to another model")
        if name not in stored and not ("_zero_point" in name and all(level.symmetric is not False for level in canonicalize(spec))):
            raise CheckpointError(f"the export lacks '{name}', which its quantization_config needs. Export the model again")


def _scales_of_activations(layer: str, config: QLayerConfig, shape: tuple[int, ...], stored: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of the stored scales for the input and the output of a layer.

    ``config`` says which scales the checkpoint must have. A layer may lack output scales, because they may be
    stored with an attention module.
    """
    for slot, columns in ((Slot.input_tensors, shape[-1]), (Slot.output_tensors, shape[0])):
        if (spec := getattr(config, slot)) is not None:
            announced = packed_scales(quantizer_for(spec, activation=True), (1, columns), "reorder")
            of_slot = {f"{layer}.{slot.checkpoint_prefix}_{suffix}": tensor for suffix, tensor in announced.items()}
            if slot is Slot.input_tensors or any(name in stored for name in of_slot):
                _refuse_misfits(of_slot, stored, spec)
            yield from (name for name in of_slot if name in stored)


def _float_shape(name: str, quantizer: TensorQuantizer, stored: Mapping[str, Tensor], order: str) -> tuple[int, ...]:
    """Return the shape of the float tensor ``name``.

    The codes and the scales of a tensor with this shape have the stored shapes.
    """
    codes = stored[name]
    for shape in _shapes(codes, quantizer.stored_level.format.bits):
        if quantizer.shape_error(shape) is None:
            packed = packed_meta(quantizer, shape, order)
            if all(
                stored[key].shape == t.shape for suffix, t in packed.items() if (key := f"{name}_{suffix}" if suffix else name) in stored
            ):
                return shape
    raise CheckpointError(f"'{name}' {list(codes.shape)} and its scales have shapes that do not match. The checkpoint is damaged")


def _shapes(packed: Tensor, bits: float) -> Iterator[tuple[int, ...]]:
    """Yield the possible shapes of a float tensor whose stored codes are ``packed``.

    An element of ``packed`` stores one code, or as many codes as fit into the element. A matrix may be stored
    transposed.
    """
    *lead, last = packed.shape
    for length in dict.fromkeys((last, round(8 * packed.itemsize * last / bits))):
        yield (*lead, length)
        if packed.ndim == 2:
            yield (length, *lead)
