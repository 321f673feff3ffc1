"""The tensors of a GGUF file: blocks of codes for quantized weights, other tensors in floating point."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from quark.base.names import folded
from quark.checkpoint.model_tensors import Region, same_weights
from quark.errors import UnsupportedError
from quark.models.layers import QuantizedLayer, QuantizerModule
from quark_exporters.gguf_layout.ggml_blocks import BLOCK, BlockType, block_type_for
from quark_exporters.gguf_layout.metadata import Family, rotary_factors

if TYPE_CHECKING:
    from gguf import TensorNameMap

__all__ = ["FLOAT_TYPES", "GgufTensor", "TensorWriter"]

FLOAT_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""Name of a floating-point type of GGML, in lower case → torch dtype."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SUFFIXES = (".weight", ".bias")


@attrs.frozen(eq=False)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: Name of the tensor in the file.
        kind: Type of the tensor, a name in `gguf.GGMLQuantizationType`.
        block: Type of the tensor's blocks. None if the tensor has floating-point numbers.
        shape: Shape of the numbers. The file has the axes in reverse order.
        make: Function that returns the content: uint8 ``[…, bytes of a row]``, or floating-point numbers of
            shape ``shape``.
    """

    name: str
    kind: str
    block: BlockType | None
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        rows, columns = torch.Size(self.shape[:-1]).numel(), self.shape[-1]
        return rows * (columns * FLOAT_TYPES[self.kind.lower()].itemsize if self.block is None else self.block.row_bytes(columns))


@attrs.frozen(eq=False)
class TensorWriter:
    """Turns parts of a model into tensors of a GGUF file.

    Attributes:
        family: Family of the model.
        config: transformers' configuration of the text model.
        names: gguf's table of tensor names.
        holds_codes: Whether quantized weights are stored as blocks of codes. Otherwise, they are stored as
            floating-point numbers.
        float_type: Type of matrices that are not quantized: a key of `FLOAT_TYPES`, or ``"auto"`` for their
            own type. Vectors are stored in f32.
    """

    family: Family
    config: Any
    names: TensorNameMap
    holds_codes: bool
    float_type: str

    def tensors(self, model: nn.Module, region: Region) -> Iterator[GgufTensor]:
        """Yield the tensors of a region in the order of the model. The experts of a block become one tensor.

        The factors of a rotary embedding come last, with the tensors outside the blocks.

        Raises:
            UnsupportedError: A tensor has no place in a GGUF file.
        """
        modules = region.modules(model)
        layers = {name: module for name, module in modules.items() if isinstance(module, QuantizedLayer)}
        own = {f"{name}.{tensor}" for name, layer in layers.items() for tensor in ("weight", "bias", *layer.other_state())}
        quantizers = [name for name, module in modules.items() if isinstance(module, QuantizerModule)]
        inside = tuple(f"{name}." for name in (*layers, *quantizers))
        own -= {f"{name}.weight" for name in same_weights(model, layers)}  # llama.cpp uses the embeddings as the output head
        by_name: dict[str, list[tuple[str, Tensor]]] = {}
        seen: set[int] = set()
        for name, tensor in region.state(model).items():
            is_inside = bool(inside) and name.startswith(inside)
            # Tied parameters are one tensor under several names. In a skeleton, equal layers share one
            # tensor.
            if (is_inside and name not in own) or (not is_inside and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            by_name.setdefault(_EXPERT.sub(".experts.", name), []).append((name, tensor))
        for joint, parts in by_name.items():
            yield self._tensor(self._name(joint), parts, layers)
        factors = None if region.root else rotary_factors(self.config)
        if factors is not None:
            yield GgufTensor("rope_freqs.weight", "F32", None, tuple(factors.shape), factors.float)

    def _name(self, name: str) -> str:
        found = self.names.get_name(name, try_suffixes=_SUFFIXES)
        if found is None:
            raise UnsupportedError(
                f"GGUF has no place for '{name}' in a model of the architecture '{self.family.architecture}': export as safetensors"
            )
        return str(found)

    def refuse_codes_without_a_type(self, model: nn.Module) -> None:
        """Check that GGML has a type for the codes of every layer of a model.

        Raises:
            UnsupportedError: GGML has no type for some tensors.
        """
        if not self.holds_codes:
            return
        lacking: dict[str, list[str]] = {}
        for name, layer in model.named_modules():
            if not isinstance(layer, QuantizedLayer) or layer.weight_quantizer is None:
                continue
            quantizer, shape = layer.weight_quantizer.quantizer, tuple(_weight(layer).shape)
            if block_type_for(quantizer, shape) is None:
                level, rows = quantizer.stored_level, f" in rows of {shape[-1]}" if shape[-1] % BLOCK else ""
                lacking.setdefault(f"{level.format.name} with scales {level.granularity}{rows}", []).append(name)
        if lacking:
            what = "; ".join(f"{how} ({folded(names)})" for how, names in lacking.items())
            raise UnsupportedError(
                f"GGUF has no type for the codes of {what}. It has Q4_0 (int4), Q4_1 (uint4 with zero points), Q8_0 (int8) and MXFP4, with "
                "scales for the tensor, each row, or groups of a multiple of 32 columns; weight_format=fake_quantized stores rounded values"
            )

    def _tensor(self, name: str, parts: Sequence[tuple[str, Tensor]], layers: Mapping[str, QuantizedLayer]) -> GgufTensor:
        first_name, first = parts[0]
        layer = layers.get(first_name.removesuffix(".weight")) if first_name.endswith(".weight") else None
        quantizer = None if layer is None else layer.weight_quantizer
        shape = tuple(first.shape) if len(parts) == 1 and not _EXPERT.search(first_name) else (len(parts), *first.shape)
        heads = self._heads_whose_rows_are_reordered(name)
        if self.holds_codes and quantizer is not None:
            block = block_type_for(quantizer.quantizer, tuple(first.shape))
            assert block is not None
            owners = [layers[part.removesuffix(".weight")] for part, _ in parts]
            return GgufTensor(name, block.name, block, shape, lambda: _stacked([_blocks(o, block, heads) for o in owners], shape))
        kind = self._float_type(name, first)
        dtype, values = FLOAT_TYPES[kind], [tensor.detach() for _, tensor in parts]
        return GgufTensor(name, kind.upper(), None, shape, lambda: _stacked([_reordered(v, heads).to(dtype) for v in values], shape))

    def _float_type(self, name: str, tensor: Tensor) -> str:
        if tensor.ndim < 2 or ".ffn_gate_inp." in name:  # llama.cpp stores the weights of routers in float32
            return "f32"
        if self.float_type != "auto":
            return self.float_type
        return next((kind for kind, dtype in FLOAT_TYPES.items() if dtype is tensor.dtype), "f32")

    def _heads_whose_rows_are_reordered(self, name: str) -> int | None:
        if not self.family.rotates_pairs:
            return None
        if ".attn_q." in name:
            return int(self.config.num_attention_heads)
        return int(self.config.num_key_value_heads) if ".attn_k." in name else None


def _blocks(layer: QuantizedLayer, block: BlockType, heads: int | None) -> Tensor:
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    assert quantizer.qparams is not None
    codes = quantizer.codes_of(_weight(layer))
    return _reordered(block.packed(codes, quantizer.qparams), heads)


def _weight(layer: QuantizedLayer) -> Tensor:
    weight: Tensor = layer.weight.detach()  # type: ignore[operator]
    return weight


def _reordered(rows: Tensor, heads: int | None) -> Tensor:
    """Reorder the rows of a projection or bias so that the two elements of each rotation are neighbours.

    Return ``rows`` unchanged if ``heads`` is None.
    """
    if heads is None:
        return rows
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _stacked(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.stack(list(parts)) if len(shape) > parts[0].ndim else parts[0]
