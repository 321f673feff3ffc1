"""Functions that select the rows and columns of a quantized layer that one rank has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.models.layers import Branch, QuantEmbedding, QuantizerModule, QuantLinear
from quark.models.layers.layers_from_codes import Packed, RunsFromCodes, runs_from_codes
from quark.models.layers.packed_weight import PackedWeight
from quark.models.layers.quantized_layers import BRANCH

__all__ = ["cut_layer", "cut_weight", "reads_whole_input", "rows_of_rank", "shared_input"]


def rows_of_rank(widths: Sequence[int], sizes: Sequence[int], rank: int, ranks: int) -> list[slice]:
    """Return the rows that one rank has of a stacked weight. There is one slice for each part of the weight.

    Args:
        widths: Number of rows of each part on all ranks together.
        sizes: Number of rows of each part on one rank. If this is more than the number of all rows divided by
            the number of ranks, several ranks have the same rows. For example, this happens with key-value
            heads.
        rank: Index of the rank.
        ranks: The number of ranks.
    """
    starts = [0, *accumulate(widths)]
    first = [start + rank * (width // size) // ranks * size for start, width, size in zip(starts, widths, sizes, strict=False)]
    return [slice(start, start + size) for start, size in zip(first, sizes, strict=True)]


def reads_whole_input(layer: nn.Module) -> bool:
    """Return whether a layer needs its whole input. It does if it rotates or quantizes the input or has a
    branch.
    """
    return bool(layer._forward_pre_hooks) or any(getattr(layer, name, None) is not None for name in ("input_quantizer", "branch"))


def shared_input(layers: Sequence[nn.Module]) -> Callable[[Tensor], Tensor] | None:
    """Return the function that all layers apply to their input before the matrix product.

    The function rotates and quantizes the input and selects columns. Return None if the layers apply
    different functions or change their outputs, or if a layer is not linear.
    """
    first, *others = layers
    if not {type(layer) for layer in layers} <= {nn.Linear, QuantLinear}:
        return None
    changes = ("output_quantizer", "branch")
    if any(layer._forward_hooks or any(getattr(layer, name, None) is not None for name in changes) for layer in layers):
        return None
    if others and (any(layer._forward_pre_hooks for layer in layers) or len({id(_of_input(layer)) for layer in layers}) > 1):
        return None

    def changed(x: Tensor) -> Tensor:
        for hook in first._forward_pre_hooks.values():
            x = hook(first, (x,))[0]
        quantizer: Any = getattr(first, "input_quantizer", None)
        return (x if quantizer is None else quantizer(x)).contiguous()

    return changed


def _of_input(layer: nn.Module) -> object:
    """Return an object that represents how a layer quantizes its input.

    Layers share one object if they quantize their inputs in the same way, with dynamic scales.
    """
    module: Any = getattr(layer, "input_quantizer", None)
    return module.quantizer if isinstance(module, QuantizerModule) and not module.is_static else module


@torch.no_grad()
def cut_layer(layer: nn.Module, rows: slice, columns: slice, *, keeps_codes: bool, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a new layer with some rows and columns of the weight of ``layer``. ``layer`` does not change.

    The new layer reads the whole input if `reads_whole_input` returns True for ``layer``. Otherwise, it reads
    only the channels of its columns.

    Args:
        layer: A linear layer or an embedding. It may be float, quantized, or `Packed`.
        rows: Output channels of a linear layer, or tokens of an embedding.
        columns: Input channels of a linear layer.
        keeps_codes: Whether the weight stays packed if possible.
        dtype: Dtype of the values of the weight and of the bias.
        device: Device of the result.

    Raises:
        CheckpointError: A stored scale is not valid.
    """
    whole: Any = (layer.from_codes() if keeps_codes else layer.unpack()) if isinstance(layer, Packed) else layer
    packed = None
    if isinstance(whole, RunsFromCodes):
        packed = cut_weight(whole.packed_weight, rows, columns)
        whole = whole.unpack()
    part: Any = copy.copy(whole)
    for kind in ("_parameters", "_buffers", "_modules", "_forward_pre_hooks"):
        setattr(part, kind, copy.copy(getattr(part, kind)))
    if packed is None:
        part._parameters["weight"] = _parameter(whole.weight[rows, columns], dtype)
    if getattr(whole, "bias", None) is not None:
        part._parameters["bias"] = _parameter(whole.bias[rows], dtype)
    if (branch := getattr(whole, "branch", None)) is not None:
        part._modules[BRANCH] = _BranchPart(copy.deepcopy(branch), rows, adds=columns.start == 0)
    if isinstance(part, nn.Linear):
        part.out_features, part.in_features = rows.stop - rows.start, columns.stop - columns.start
        if part.in_features < whole.in_features and reads_whole_input(part):
            _take_columns(part, columns)
    if isinstance(part, nn.Embedding):  # the class may multiply the rows by a constant, but vLLM's models do this themselves
        part.__class__ = QuantEmbedding if isinstance(part, QuantEmbedding) else nn.Embedding
    if packed is not None:
        part = runs_from_codes(part, attrs.evolve(packed, dtype=dtype))
    return part.to(device)


def _parameter(values: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(values.detach().to(dtype, memory_format=torch.contiguous_format, copy=True), requires_grad=False)


def _take_columns(layer: nn.Module, columns: slice) -> None:
    """Change a layer so that it uses only the channels ``columns`` of its rotated and quantized input."""
    quantizer: Any = getattr(layer, "input_quantizer", None)
    taken = _Columns(columns)
    if quantizer is not None or getattr(layer, "branch", None) is not None:
        layer.input_quantizer = nn.Sequential(*([] if quantizer is None else [quantizer]), taken)
    else:
        layer.register_forward_pre_hook(lambda _, args: (taken(args[0]), *args[1:]))


class _BranchPart(Branch):
    """The rows of a branch on one rank.

    If the columns of the weight are divided among ranks, only the first rank adds the branch's output.
    """

    def __init__(self, branch: Branch, rows: slice, *, adds: bool) -> None:
        super().__init__()
        self.branch, self._rows, self._adds = branch, rows, adds

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x)[..., self._rows] if self._adds else x.new_zeros(())

    def rest(self, x: Tensor) -> Tensor:
        return self.branch.rest(x)


class _Columns(nn.Module):
    """Selects channels of an input."""

    def __init__(self, columns: slice) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.columns]


@torch.no_grad()
def cut_weight(weight: PackedWeight, rows: slice, columns: slice) -> PackedWeight | None:
    """Return a packed weight that has only some rows and columns of ``weight``.

    Return None if the codes or scales cannot be cut at these rows and columns.
    """
    if (rows, columns) == (slice(0, weight.shape[0]), slice(0, weight.shape[1])):
        return weight
    try:
        part = _cut_columns(weight.part(rows), columns)
        return part if torch.equal(part.values(), weight.values()[rows, columns]) else None
    except Exception:  # a format may raise any error if its groups do not divide these rows or columns
        return None


def _cut_columns(weight: PackedWeight, columns: slice) -> PackedWeight:
    if columns == slice(0, weight.shape[1]):
        return weight
    shape, granularity = (weight.shape[0], columns.stop - columns.start), weight.packing.quantizer.granularity
    codes, qparams = weight.codes()
    whole, cut = granularity.scale_shape(weight.shape), granularity.scale_shape(shape)

    def cut_scale(scale: Tensor) -> Tensor:
        for axis, (many, few) in enumerate(zip(whole, cut, strict=True)):
            if many != few:
                scale = scale.narrow(axis, columns.start * many // weight.shape[1], few)
        return scale.contiguous()

    own = attrs.evolve(qparams, outer_scale=None, table=None).map(cut_scale)
    own = attrs.evolve(own, outer_scale=qparams.outer_scale, table=qparams.table)
    return attrs.evolve(weight, tensors=weight.packing.pack(codes[:, columns].contiguous(), own), shape=shape)
