"""Functions for those tensors that all layouts write in the same way.

These are unquantized tensors, and scales of activations and attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TypeVar

import attrs
import torch
from torch import Tensor, nn

from quark.base.finite import is_finite
from quark.base.log import get_logger
from quark.base.names import folded
from quark.base.parallel import CPU, parallel_map
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import ExportOptions
from quark.checkpoint.shard_writer import ShardWriter
from quark.errors import CheckpointError
from quark.models.hf.dequantizer import DequantizedTensors
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.internals import directory_of, input_embeddings, output_embeddings, source_of, tied_on_loading
from quark.models.hf.quantized_source import float_tensors_of
from quark.models.hf.shards import check_shards
from quark.models.layers import QuantizerModule, have_same_weight
from quark.models.layers.attention import PROBABILITIES, QUERY, STATES, STORED_STATES
from quark.models.layers.coded_layer import packed_scales
from quark.models.layers.packed_layers import as_vector
from quark.models.plan.attention import AttentionRow
from quark.models.plan.decoder_blocks import owners
from quark.models.plan.kv_scales import merge_kv_scales
from quark.models.plan.rules import first_match
from quark.numbers import QParams

V = TypeVar("V")

_SMALL = 1 << 24
"""Number of bytes of a section of the file. Parts that end in the same section are computed and written
together.
"""
STORED_PROBABILITIES = "prob_output"
"""Prefix of the names of scales of attention probabilities, such as ``prob_output_scale``.

Source: checkpoints of AMD Quark 0.13.
"""


@attrs.frozen(eq=False)
class Part:
    """Tensors that are computed together, such as the tensors of a layer.

    All tensors of a part are written to the same file.

    Attributes:
        meta: A dictionary from the full name of each tensor to a meta tensor with the same shape and dtype.
        make: A function that computes the tensors, and returns a dictionary from full name to tensor.
        device: The device on which ``make`` computes.
    """

    meta: Mapping[str, Tensor]
    make: Callable[[], Mapping[str, Tensor]]
    device: torch.device = CPU

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """Return one part with the tensors of several parts. On a CPU, several threads compute the parts."""
        device = next((part.device for part in parts if part.device != CPU), CPU)

        def make() -> dict[str, Tensor]:
            return {name: t for made in parallel_map(operator.call, [part.make for part in parts], device) for name, t in made.items()}

        return cls({name: t for part in parts for name, t in part.meta.items()}, make, device)


def small_joined(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield ``parts``, but join small neighbours into one part, because they are written faster together.

    The data is cut into sections of `_SMALL` bytes. Parts that end in the same section are joined.
    """
    ends = accumulate(sum(tensor.nbytes for tensor in part.meta.values()) for part in parts)
    for _, group in groupby(zip(parts, ends, strict=True), lambda pair: pair[1] // _SMALL):
        yield Part.joined([part for part, _ in group])


@attrs.frozen
class Region:
    """A part of a model whose tensors are written together.

    A region is one module without some of the modules inside it.

    Attributes:
        root: Full name of the module. It is empty for the model itself.
        without: Full names of the modules inside ``root`` that do not belong to the region.
    """

    root: str = ""
    without: tuple[str, ...] = ()

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return a dictionary from full name to module for all modules of the region, in the model's order.

        A shared module appears under each of its names.
        """
        return self._inside(model.get_submodule(self.root).named_modules(prefix=self.root, remove_duplicate=False))

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers of the region as a dictionary.

        A key is a full name. The dictionary is in the model's order. The names of tied tensors map to the
        same object.
        """
        prefix = f"{self.root}." if self.root else ""
        return self._inside(model.get_submodule(self.root).state_dict(keep_vars=True, prefix=prefix).items())

    def _inside(self, named: Iterable[tuple[str, V]]) -> dict[str, V]:
        """Return those pairs of ``named`` whose names are not in an excluded module, as a dictionary."""
        excluded = set(self.without)
        return {name: value for name, value in named if excluded.isdisjoint((name, *owners(name)))}


def is_tied_apart(model: nn.Module) -> bool:
    """Return whether ``tie_word_embeddings`` must become False in the config that an export writes.

    The result is True if quantization has untied the head from the embeddings, and the config ties no other
    tensors. If the config also ties other tensors, the setting stays. This does no harm, because readers do
    not tie tensors with different values.
    """
    if not getattr(model.config, "tie_word_embeddings", False) or len(tied_on_loading(model)) > 1:
        return False
    head, embedding = output_embeddings(model), input_embeddings(model)
    return head is not None and embedding is not None and not have_same_weight(head, embedding)


def same_weights(model: nn.Module, layers: Collection[str]) -> dict[str, str]:
    """Return the quantized layers that a reader ties to another layer with the same codes and scales.

    Args:
        model: The quantized model.
        layers: Full names of quantized layers. Both layers of a pair must be among them.

    Returns:
        A dictionary from the name of such a layer to the name of the other layer.
    """
    pairs = ((name.removesuffix(".weight"), source.removesuffix(".weight")) for name, source in tied_on_loading(model).items())
    own = ((name, source) for name, source in pairs if name in layers and source in layers)
    return {name: source for name, source in own if have_same_weight(model.get_submodule(name), model.get_submodule(source))}


def plain_parts(state: Mapping[str, Tensor], elsewhere: Iterable[str], others: Collection[str], ties: Mapping[str, str]) -> list[Part]:
    """Return a part for each tensor that is stored unchanged.

    If two tensors are tied when the model is loaded, they are stored once, under the first name. Other shared
    tensors are stored under each of their names, because a reader cannot find out that they are shared.

    Args:
        state: A dictionary from full name to tensor. The names of shared tensors map to the same object.
        elsewhere: Full names of modules whose tensors are stored in another way.
        others: Full names of tensors in the modules ``elsewhere`` that are stored unchanged nevertheless.
        ties: The result of `tied_on_loading` for the model.
    """
    inside, seen = set(elsewhere), set()
    parts = []
    plain = {name: tensor for name, tensor in state.items() if name in others or inside.isdisjoint(owners(name))}
    for name, tensor in plain.items():
        source = ties.get(name, name)
        stored_as = source if plain.get(source) is tensor else name
        if stored_as not in seen:
            seen.add(stored_as)
            parts.append(Part({name: tensor.detach().to("meta")}, lambda n=name, t=tensor: {n: t}))  # type: ignore[misc]
    return parts


def carried_parts(content: CheckpointContent) -> list[Part]:
    """Return a part for each tensor of the source checkpoint that the model's class does not use.

    Such a tensor is copied without changes. But if the source checkpoint stores it as codes, the codes are
    dequantized to the dtype of the model.

    Raises:
        CheckpointError: The source checkpoint has been removed or changed.
    """
    names = content.plan.carried
    if not names:
        return []
    directory = directory_of(content.model.config) or Path(source_of(content.model.config))
    shards = check_shards(directory)
    files, made = FileTensors(shards), float_tensors_of(directory, shards)
    tensors = files if made is None else DequantizedTensors(files, made, directory)
    if lost := [name for name in names if name not in tensors.meta]:
        raise CheckpointError(f"'{directory}' has lost {folded(lost)} since the run was planned. Restore the checkpoint")
    dtype = next(p.dtype for p in content.model.parameters() if p.is_floating_point())

    def part(name: str) -> Part:
        meta = tensors.meta[name]
        meta = meta if meta is files.meta.get(name) else torch.empty(meta.shape, dtype=dtype, device="meta")

        def make() -> dict[str, Tensor]:
            with tensors.reading(CPU) as read:
                tensor = read(name, meta.dtype).to(meta.dtype)
            if tensor.is_floating_point() and not is_finite(tensor):
                get_logger(__name__).warning(f"'{name}' in '{directory}' holds NaN or Inf, and is copied unchanged")
            return {name: tensor}

        return Part({name: meta}, make)

    return [part(name) for name in names]


def warn_of_left_out(content: CheckpointContent, form: str) -> None:
    """Log a warning that a file of the form ``form`` lacks the tensors that `carried_parts` would copy.

    If there are no such tensors, do nothing.
    """
    if names := getattr(content.plan, "carried", ()):  # the plan of a graph has no such attribute
        get_logger(__name__).warning(
            f"A {form} file holds only the tensors of a {type(content.model).__name__}. It lacks {len(names)} other tensor(s) of the float "
            f"checkpoint: {folded(names)}. If you need them, use the exporter 'safetensors', which copies them"
        )


def activation_tensors(module: QuantizerModule | None, qparams: QParams | None, options: ExportOptions) -> dict[str, Tensor]:
    """Return the tensors to store for a static quantizer of an activation, as a dictionary from suffix.

    They contain the scales ``qparams``, or the scales of ``module`` if ``qparams`` is None.
    """
    stored = qparams or (module.qparams if module is not None else None)
    if module is None or stored is None:
        return {}
    packed = module.quantizer.pack_qparams(stored, order=options.pack_method)
    return {suffix: t for suffix, t in packed.items() if is_stored(suffix, module, options)}


def is_stored(suffix: str, module: QuantizerModule, options: ExportOptions) -> bool:
    """Return whether the tensor with the suffix ``suffix`` is written.

    Zero points that are all 0 are left out if ``options.zero_points`` is False.
    """
    return options.zero_points or not suffix.startswith("zero_point") or module.zero_point is not None


def scale_suffixes(module: QuantizerModule | None, options: ExportOptions, shape: tuple[int, ...] = (1,)) -> list[str]:
    """Return the suffixes that `activation_tensors` may return for an activation of shape ``shape``.

    The batch size in ``shape`` must be 1. The result is empty if the activation has no static scales.
    """
    return [] if module is None else list(packed_scales(module.quantizer, shape, options.pack_method))


def attention_quantizers(modules: Mapping[str, nn.Module]) -> dict[str, QuantizerModule]:
    """Return a dictionary from full name to module for the quantizers in attention modules.

    These are the quantizers of probabilities, queries, keys and values.
    """
    return {n: m for n, m in modules.items() if isinstance(m, QuantizerModule) and n.rpartition(".")[2] in (PROBABILITIES, *STATES)}


def probability_parts(quantizers: Mapping[str, QuantizerModule], options: ExportOptions) -> Iterator[Part]:
    """Yield a part with the scales of each quantizer of attention probabilities.

    ``quantizers`` is the result of `attention_quantizers`.
    """
    for name, module in quantizers.items():
        attention, _, attribute = name.rpartition(".")
        tensors = activation_tensors(module, None, options) if attribute == PROBABILITIES else {}
        if tensors:
            yield _scales({f"{attention}.{STORED_PROBABILITIES}_{suffix}": t for suffix, t in tensors.items()})


def state_parts(
    model: nn.Module, attentions: Iterable[AttentionRow], layers: Collection[str], options: ExportOptions, *, as_vectors: bool = False
) -> Iterator[Part]:
    """Yield a part for each attention module that stores the scales of its queries, keys and values itself.

    Args:
        model: The quantized model.
        attentions: The attention modules that store these scales themselves.
        layers: Full names of the quantized layers in the region that is written.
        options: Options of the export.
        as_vectors: Whether scales are stored with the shape ``[1]`` instead of ``[]``, and with the shape
            ``[heads, 1, 1]`` instead of ``[heads]``.
    """
    for row in attentions:
        here = [state for state, (layer, _) in row.states.items() if layer in layers]
        states = {state: getattr(model.get_submodule(row.name), state) for state in here}
        cached = [q.scale for state, q in states.items() if state != QUERY and q.scale is not None and q.scale.ndim == 0]
        is_merged = any(first_match(layer, options.kv_cache_group) for layer, _ in row.states.values())
        merged = QParams(merge_kv_scales(cached, options.min_kv_scale)) if cached and is_merged else None
        tensors = {
            f"{row.name}.{STORED_STATES[state]}_{suffix}": as_vector(tensor) if as_vectors else tensor
            for state, quantizer in states.items()
            for suffix, tensor in activation_tensors(quantizer, None if state == QUERY else merged, options).items()
        }
        if tensors:
            yield _scales(tensors)


def _scales(tensors: Mapping[str, Tensor]) -> Part:
    """Return a part with the existing tensors ``tensors``."""
    return Part({name: t.to("meta") for name, t in tensors.items()}, lambda: tensors)


def set_attention_scales(
    quantizers: Mapping[str, QuantizerModule],
    attentions: Iterable[AttentionRow],
    written: ShardWriter,
    options: ExportOptions,
    *,
    as_vectors: bool = False,
) -> None:
    """Set the scales of the quantizers in attention modules from written tensors.

    These tensors were written by `probability_parts` and `state_parts`.

    Args:
        quantizers: The result of `attention_quantizers`. The quantizers have no scales yet.
        attentions: The attention modules that store scales of queries, keys and values themselves.
        written: The writer that reads the written tensors.
        options: Options of the export.
        as_vectors: Whether scales are stored with the shapes that `state_parts` describes.
    """
    owners = [name.rpartition(".")[0] for name in quantizers if name.rpartition(".")[2] == PROBABILITIES]
    stored_as: dict[str, tuple[str, tuple[int, ...]]]
    stored_as = {f"{owner}.{PROBABILITIES}": (f"{owner}.{STORED_PROBABILITIES}", (1,)) for owner in owners}
    stored_as |= {f"{a.name}.{state}": (f"{a.name}.{STORED_STATES[state]}", a.state_shape) for a in attentions for state in a.states}
    for name, (prefix, shape) in stored_as.items():
        module = quantizers.get(name)
        announced = {} if module is None else packed_scales(module.quantizer, shape, options.pack_method)
        tensors = {suffix: written.read(f"{prefix}_{suffix}") for suffix in announced if f"{prefix}_{suffix}" in written}
        if module is None or not tensors:
            continue
        if as_vectors:
            tensors = {suffix: tensor.reshape(announced[suffix].shape) for suffix, tensor in tensors.items()}
        module.set_qparams(module.quantizer.unpack_qparams(tensors, shape, order=options.pack_method))
