"""QuarkDequantizer: float weights of a checkpoint in the Quark layout, to be quantized anew.

Any tool may have written the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quark.base.log import get_logger
from quark.checkpoint import FloatTensor
from quark.checkpoint.provenance import refuse_unreadable
from quark.config.layer import TensorSpec
from quark.config.slot import PARAMETERS, Slot
from quark.errors import CheckpointError, UnsupportedError
from quark.models.layers.packed_layers import packed_meta
from quark.models.plan.rules import layer_config_for
from quark.numbers import cast_finite, quantizer_for
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark_exporters.quark_layout.quantization_config import read_quantization_config

__all__ = ["QuarkDequantizer"]


class QuarkDequantizer:
    """Dequantizes the Quark layout, as `quark.checkpoint.Dequantizer`."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """As `quark.checkpoint.Dequantizer.float_tensors`.

        Raises:
            UnsupportedError: An algorithm runs with the model, whose weights are not those of the float model
                then.
        """
        parsed = read_quantization_config(block)
        refuse_unreadable(parsed.config)
        if names := parsed.config.run_time_algorithms:
            raise UnsupportedError(
                f"the algorithm {', '.join(names)} runs with the model of this checkpoint, so its weights are not those of the float "
                "model: give the float checkpoint"
            )
        get_logger(__name__).warning(
            "The source is an export of quantized weights: what its rounding lost stays lost, and a second rounding adds to it. Give the "
            "float checkpoint where there is one."
        )
        for name in stored:
            layer, _, leaf = name.rpartition(".")
            if leaf in PARAMETERS and any(other.startswith(f"{name}_") for other in _beside(name, stored)):
                config = layer_config_for(parsed.config, layer, torch.nn.Linear).config
                spec = None if config is None else getattr(config, leaf)
                if spec is not None:
                    yield _float_tensor(name, spec, stored, parsed.pack_method, parsed.config.weight_format == "fake_quantized")


def _float_tensor(name: str, spec: TensorSpec, stored: Mapping[str, Tensor], order: str, holds_values: bool) -> FloatTensor:
    beside = _beside(name, stored)
    if holds_values:
        return FloatTensor(
            name=name,
            shape=tuple(stored[name].shape),
            sources=(name,),
            make=lambda tensors, dtype: cast_finite(tensors[name], dtype),
            left_out=beside,
        )
    quantizer = quantizer_for(spec, activation=False)
    shape = _float_shape(name, quantizer, stored, order)
    announced = packed_meta(quantizer, shape, order)
    scales = [f"{name}_{suffix}" for suffix in announced if suffix and f"{name}_{suffix}" in stored]
    # Zero points of symmetric codes are all 0, and need not be stored.
    zeros = {suffix: t for suffix, t in announced.items() if suffix.startswith("zero_point") and f"{name}_{suffix}" not in stored}

    def make(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed = {suffix: torch.zeros_like(t, device=tensors[name].device) for suffix, t in zeros.items()}
        packed |= {"": tensors[name], **{scale.removeprefix(f"{name}_"): tensors[scale] for scale in scales}}
        codes, qparams = quantizer.unpack(packed, shape, order=order)
        return cast_finite(quantizer.dequantize(codes, qparams), dtype)

    return FloatTensor(name=name, shape=shape, sources=(name, *scales), make=make, left_out=tuple(n for n in beside if n not in scales))


def _float_shape(name: str, quantizer: TensorQuantizer, stored: Mapping[str, Tensor], order: str) -> tuple[int, ...]:
    """Return the shape of the float tensor: the one whose packing has the stored shapes."""
    codes = stored[name]
    for shape in _shapes(codes, quantizer.stored_level.format.bits):
        if quantizer.shape_error(shape) is None:
            packed = packed_meta(quantizer, shape, order)
            if all(
                stored[key].shape == t.shape for suffix, t in packed.items() if (key := f"{name}_{suffix}" if suffix else name) in stored
            ):
                return shape
    raise CheckpointError(f"'{name}' {list(codes.shape)} and its scales fit no shape of a weight in its format: the checkpoint is damaged")


def _shapes(packed: Tensor, bits: float) -> Iterator[tuple[int, ...]]:
    """Yield shapes whose codes may be stored so.

    One code is in each element, or as many on the last axis as its bits allow; transposed or not.
    """
    *lead, last = packed.shape
    for length in dict.fromkeys((last, round(8 * packed.itemsize * last / bits))):
        yield (*lead, length)
        if packed.ndim == 2:
            yield (length, *lead)


def _beside(name: str, stored: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the other tensors of a layer that are scales.

    Those of the parameter itself, and with a weight those of the layer's input and output.
    """
    layer, _, leaf = name.rpartition(".")
    prefixes = [leaf, *(slot.checkpoint_prefix for slot in (Slot.input_tensors, Slot.output_tensors) if leaf == "weight")]
    names = (f"{layer}.{prefix}_{part}{level}" for prefix in prefixes for part in ("scale", "zero_point") for level in ("", "_2", "_3"))
    return tuple(n for n in names if n in stored)
