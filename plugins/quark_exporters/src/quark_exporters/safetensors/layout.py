"""The tensors of an export, part by part: packed codes and scales of quantized layers, everything else as it is."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from quark.export.naming import checkpoint_name
from quark.export.protocol import ExportOptions
from quark.export.writer import Part
from quark.nn import QuantizedLayer, QuantizerModule
from quark.nn.packed import SLOTS, packed_meta
from quark.numerics import QParams


def quantized_parts(model: nn.Module, options: ExportOptions) -> list[Part]:
    """A part for each quantized layer and for each other tensor, in the model's order."""
    outputs = _merged_outputs(model, options)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    plain = _plain_parts(model, layers)
    return [*plain, *(_layer_part(name, layer, options, outputs.get(name)) for name, layer in layers.items())]


def float_parts(model: nn.Module) -> list[Part]:
    """Every parameter and persistent buffer of a float model; weights are the rounded values, scales are left out."""
    scales = {f"{name}." for name, m in model.named_modules() if isinstance(m, QuantizerModule)}
    return [part for part in _plain_parts(model, {}) if not any(name.startswith(tuple(scales)) for name in part.meta)]


def is_tied_apart(model: nn.Module) -> bool:
    """Whether the config says that input and output embeddings are one tensor and quantizing has made them two."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return False
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    return head is not None and head.weight is not embedding.weight


def _plain_parts(model: nn.Module, layers: dict[str, QuantizedLayer]) -> list[Part]:
    inside = tuple(f"{name}." for name in layers)
    parts, seen = [], set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Tied parameters are one tensor under several names: readers expect it once, under the first.
        if (name.startswith(inside) and inside) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        parts.append(Part({name: tensor.detach().to("meta")}, lambda n=name, t=tensor: {n: t}))  # type: ignore[misc]
    return parts


def _layer_part(name: str, layer: QuantizedLayer, options: ExportOptions, output: QParams | None) -> Part:
    meta = dict(_meta(name, layer, options))
    return Part(meta, lambda: {n: t for n, t in _tensors(name, layer, options, output) if n in meta})


def _meta(name: str, layer: QuantizedLayer, options: ExportOptions) -> Iterator[tuple[str, Tensor]]:
    for slot in ("weight", "bias"):
        tensor = getattr(layer, slot, None)
        if tensor is None:
            continue
        quantizer: QuantizerModule | None = getattr(layer, SLOTS[slot])
        if quantizer is None:
            yield checkpoint_name(name, slot, ""), tensor.detach().to("meta")
            continue
        packed = packed_meta(quantizer.quantizer, tuple(tensor.shape), options.pack_method)
        yield from ((checkpoint_name(name, slot, suffix), t) for suffix, t in packed.items() if _wanted(suffix, quantizer, options))
    for slot in ("input_tensors", "output_tensors"):
        for suffix, t in _activation(getattr(layer, SLOTS[slot]), None, options).items():
            yield checkpoint_name(name, slot, suffix), t.to("meta")


def _tensors(name: str, layer: QuantizedLayer, options: ExportOptions, output: QParams | None) -> Iterator[tuple[str, Tensor]]:
    for slot in ("weight", "bias"):
        tensor = getattr(layer, slot, None)
        quantizer: QuantizerModule | None = getattr(layer, SLOTS[slot])
        if tensor is None:
            continue
        if quantizer is None or quantizer.qparams is None:
            yield checkpoint_name(name, slot, ""), tensor
            continue
        codes = quantizer.quantizer.quantize(tensor.detach(), quantizer.qparams)
        packed = quantizer.quantizer.pack(codes, quantizer.qparams, order=options.pack_method)
        yield from ((checkpoint_name(name, slot, suffix), t) for suffix, t in packed.items())
    for slot, qparams in (("input_tensors", None), ("output_tensors", output)):
        for suffix, t in _activation(getattr(layer, SLOTS[slot]), qparams, options).items():
            yield checkpoint_name(name, slot, suffix), t


def _activation(module: QuantizerModule | None, qparams: QParams | None, options: ExportOptions) -> dict[str, Tensor]:
    """Stored scales of a static activation quantizer: ``qparams`` where they are given, else its own."""
    found = qparams or (module.qparams if module is not None else None)
    if module is None or found is None:
        return {}
    packed = module.quantizer.pack_qparams(found, order=options.pack_method)
    return {suffix: t for suffix, t in packed.items() if _wanted(suffix, module, options)}


def _wanted(suffix: str, module: QuantizerModule, options: ExportOptions) -> bool:
    return options.zero_points or not suffix.startswith("zero_point") or module.zero_point is not None


def _merged_outputs(model: nn.Module, options: ExportOptions) -> dict[str, QParams]:
    """Scales of the cache that the caller wants merged at the export: in each block the largest of them, not below the floor."""
    siblings: dict[str, list[str]] = {}
    scales: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if (
            isinstance(layer, QuantizedLayer)
            and layer.output_quantizer is not None
            and any(fnmatchcase(name, p) for p in options.kv_cache_group)
        ):
            qparams = layer.output_quantizer.qparams
            if qparams is not None and qparams.scale.numel() == 1:
                siblings.setdefault(name.rpartition(".")[0], []).append(name)
                scales[name] = qparams.scale
    merged = {parent: torch.stack([scales[n] for n in names]).amax().clamp(min=options.min_kv_scale) for parent, names in siblings.items()}
    return {name: QParams(merged[parent]) for parent, names in siblings.items() for name in names}
