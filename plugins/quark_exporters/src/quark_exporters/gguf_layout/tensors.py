"""Converts a model to the tensors of a GGUF file.

Quantized weights become blocks of codes, and all other tensors are stored in floating point.
"""

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
"""Maps the lower-case name of a floating-point type of GGML to the torch dtype."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SUFFIXES = (".weight", ".bias")


@attrs.frozen(eq=False)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: Name of the tensor in the file.
        kind: Type of the tensor, as a name in `gguf.GGMLQuantizationType`.
        block: GGML type of a quantized tensor, or None if the tensor stores floating-point numbers.
        shape: Shape of the tensor in torch. The file lists the axes in reverse.
        make: Function that returns the content. For a quantized tensor, it returns uint8 ``[…, bytes of a
            row]``; otherwise, floating-point numbers in the shape ``shape``.
    """

    name: str
    kind: str
    block: BlockType | None
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensor in the file."""
        rows, columns = torch.Size(self.shape[:-1]).numel(), self.shape[-1]
        return rows * (columns * FLOAT_TYPES[self.kind.lower()].itemsize if self.block is None else self.block.row_bytes(columns))


@attrs.frozen(eq=False)
class TensorWriter:
    """Converts parts of a model to tensors of a GGUF file.

    Attributes:
        family: Family of the model.
        config: Configuration of the text model in transformers.
        names: The table in the gguf package that maps names in a model to names in a file.
        holds_codes: Whether quantized weights become blocks of codes. Otherwise they become floating-point
            numbers.
        float_type: Type in which float matrices are stored, as a key of `FLOAT_TYPES`. With ``"auto"``, each
            matrix keeps its type. Vectors are always stored in f32.
    """

    family: Family
    config: Any
    names: TensorNameMap
    holds_codes: bool
    float_type: str

    def tensors(self, model: nn.Module, region: Region) -> Iterator[GgufTensor]:
        """Yield the tensors of a part of the model, such as a decoder block.

        For each projection, the weights of all experts of a block are stacked to one tensor. After the
        tensors outside the blocks follow the factors of the rotary embedding.

        Raises:
            UnsupportedError: The GGUF architecture has no name for a tensor.
        """
        modules = region.modules(model)
        layers = {name: module for name, module in modules.items() if isinstance(module, QuantizedLayer)}
        own = {f"{name}.{tensor}" for name, layer in layers.items() for tensor in ("weight", "bias", *layer.other_state())}
        quantizers = [name for name, module in modules.items() if isinstance(module, QuantizerModule)]
        inside = tuple(f"{name}." for name in (*layers, *quantizers))
        own -= {f"{name}.weight" for name in same_weights(model, layers)}  # for a tied head: llama.cpp uses the embeddings as the head
        by_name: dict[str, list[tuple[str, Tensor]]] = {}
        seen: set[int] = set()
        for name, tensor in region.state(model).items():
            is_inside = bool(inside) and name.startswith(inside)
            # A tied parameter is one tensor with several names, so it is written once. Tensors of quantized
            # layers are exempt, because in a quantized skeleton equal layers share one tensor.
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
                f"GGUF has no tensor for '{name}' in a model of the architecture '{self.family.architecture}'. Export as safetensors"
            )
        return str(found)

    def refuse_codes_without_a_type(self, model: nn.Module) -> None:
        """Raise an error if GGML has no type for the codes of some layer of the model.

        Raises:
            UnsupportedError: GGML has no type for the codes. The message names the layers and their formats.
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
                "one scale for the tensor, each row, or each group of a multiple of 32 columns. Set weight_format=fake_quantized to store "
                "rounded values instead"
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
        if tensor.ndim < 2 or ".ffn_gate_inp." in name:  # llama.cpp stores vectors and the routers of experts in float32
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
    """Reorder rows so that the two rows of each pair in the rotary embedding become neighbours.

    ``rows`` are the rows of a projection or a bias. If ``heads`` is None, return them unchanged.
    """
    if heads is None:
        return rows
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _stacked(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.stack(list(parts)) if len(shape) > parts[0].ndim else parts[0]
