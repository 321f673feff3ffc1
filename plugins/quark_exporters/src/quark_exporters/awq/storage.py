"""AwqStorage: tensors of a layer as AutoAWQ stores them for its kernel ``gemm``.

===========  ==============================================================================================
tensor       contents
===========  ==============================================================================================
``qweight``  int32 ``[I, O / 8]``: codes from 0, in the order `ORDER` from the lowest bits of a word
``qzeros``   int32 ``[I / group, O / 8]``: zero points, likewise
``scales``   ``[I / group, O]``, float16
===========  ==============================================================================================

Source: ``vllm/model_executor/layers/quantization/auto_awq.py`` of vLLM 0.32; ``awq/utils/packing_utils.py``
of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from quark.checkpoint import CodedLayer
from quark.config.enums import ZeroPointType
from quark.config.layer import QLayerConfig
from quark.errors import ConfigError, UnsupportedError
from quark.numbers import QParams, canonicalize, quantizer_for
from quark_exporters.words import packed_words, unpacked_words

__all__ = ["ORDER", "SCALE_TYPES", "AwqStorage", "group_size_of"]

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring output channels is in each half byte of a word, from the lowest bits."""
SCALE_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_PER_WORD = len(ORDER)
_SHIFT = 8
"""Added to signed codes: a symmetric weight has this zero point everywhere."""


def _scale_type(_: object, attribute: object, value: str) -> None:
    if value not in SCALE_TYPES:
        raise ConfigError(f"scale_type is {value!r}, which is none of: {', '.join(SCALE_TYPES)}")


@attrs.frozen
class AwqStorage:
    """As `quark.checkpoint.LayerStorage`.

    Attributes:
        scale_type: In which dtype scales are stored, a key of `SCALE_TYPES`; they are read in any.
    """

    scale_type: str = attrs.field(default="float16", validator=_scale_type)

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        """As `quark.checkpoint.LayerStorage.why_not`."""
        if config.input_tensors is not None:
            return "AWQ quantizes weights alone, and its input is quantized"
        if config.weight is None:
            return "its weight is float"
        specs = canonicalize(config.weight)
        weight, names = specs[0], " → ".join(level.dtype.name for level in specs)
        kind = (len(specs), weight.dtype.name, bool(weight.symmetric))
        if kind not in ((1, "int4", True), (1, "uint4", False)):
            return f"AWQ holds int4 without and uint4 with zero points, and not {names} {'without' if weight.symmetric else 'with'} them"
        if group_size_of(config) is None:
            return f"AWQ has scales for groups of input channels, and not {weight.qscheme.name if weight.qscheme else None}"
        if weight.scale_format not in (None, "float32"):
            return f"AWQ keeps scales as floating-point numbers, and these are {weight.scale_format}"
        if not weight.symmetric and weight.zero_point_type is ZeroPointType.float32:
            return "AWQ has whole zero points, and these are real numbers (zero_point_type=float32)"
        return f"AWQ packs {_PER_WORD} output channels into a word, and it has {shape[0]}" if shape[0] % _PER_WORD else None

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        """As `quark.checkpoint.LayerStorage.stored`.

        Raises:
            UnsupportedError: A scale is too large for its dtype.
        """
        shift = _SHIFT if layer.codes.dtype is torch.int8 else 0
        codes = (layer.codes.to(torch.int16) + shift).to(torch.uint8)
        scale = layer.qparams.scale.reshape(len(codes), -1)
        zeros = torch.zeros_like(scale) if layer.qparams.zero_point is None else layer.qparams.zero_point.reshape(scale.shape)
        zeros = (zeros.to(torch.int16) + shift).to(torch.uint8)
        return {"qweight": _packed(codes), "qzeros": _packed(zeros), "scales": self._scales(scale).t().contiguous()}

    def _scales(self, scale: Tensor) -> Tensor:
        dtype = SCALE_TYPES[self.scale_type]
        finfo = torch.finfo(dtype)
        # A scale that rounds to 0 would make its group 0: the smallest number is nearer to what it was.
        stored = scale.clamp(min=finfo.smallest_normal * finfo.eps).to(dtype)
        if not stored.is_meta and bool(stored.isinf().any()):
            raise UnsupportedError(
                f"a scale is {float(scale.max()):.3g}, which {self.scale_type} cannot hold: export with the option scale_type=bfloat16"
            )
        return stored

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        """As `quark.checkpoint.LayerStorage.restored`."""
        assert config.weight is not None
        quantizer = quantizer_for(config.weight, activation=False)
        dtype = quantizer.stored_level.format.storage_dtype
        shift, scale_shape = _SHIFT if dtype is torch.int8 else 0, quantizer.granularity.scale_shape(shape)
        codes = (_unpacked(tensors["qweight"], shape[0]).to(torch.int16) - shift).to(dtype)
        scale = tensors["scales"].t().contiguous().float().reshape(scale_shape)
        zeros = None if shift else _unpacked(tensors["qzeros"], shape[0]).to(torch.int32).reshape(scale_shape)
        return CodedLayer(config, codes, QParams(scale, zeros))


def group_size_of(config: QLayerConfig) -> int | None:
    """Return how many input channels of a weight share a scale, -1 for all; None where scales are shared otherwise."""
    assert config.weight is not None
    weight = canonicalize(config.weight)[0]
    qscheme = None if weight.qscheme is None else weight.qscheme.name
    if qscheme == "per_channel" and weight.ch_axis in (0, -2):
        return -1
    return weight.group_size if qscheme == "per_group" else None


def _packed(codes: Tensor) -> Tensor:
    """Return codes ``[O, n]`` as words ``[n, O / 8]``."""
    return packed_words(codes.t().unflatten(1, (-1, _PER_WORD))[..., list(ORDER)].flatten(1), 4)


def _unpacked(words: Tensor, rows: int) -> Tensor:
    """Return the codes ``[O, n]`` of words ``[n, O / 8]``, uint8."""
    back = sorted(range(_PER_WORD), key=ORDER.__getitem__)
    return unpacked_words(words, 4, rows).unflatten(1, (-1, _PER_WORD))[..., back].flatten(1).t().contiguous()
