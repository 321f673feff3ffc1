"""`CheckpointExporter`, the base class of exporters that write a Hugging Face checkpoint.

Such a checkpoint is a directory with safetensors files, ``config.json`` and companions such as a tokenizer.
"""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quark.base.finite import buffers_of, refuse_non_finite
from quark.base.names import folded
from quark.checkpoint.companions import save_companions
from quark.checkpoint.content import CheckpointContent, is_float
from quark.checkpoint.exported_layer import ExportedLayer, exported_layers
from quark.checkpoint.exporter import BlockStream, Exporter, ExportOptions
from quark.checkpoint.layer_storage import LayerStorage
from quark.checkpoint.model_tensors import (
    Part,
    Region,
    attention_quantizers,
    carried_parts,
    is_tied_apart,
    plain_parts,
    probability_parts,
    same_weights,
    set_attention_scales,
    small_joined,
    state_parts,
)
from quark.checkpoint.shard_layout import ShardLayout
from quark.checkpoint.shard_writer import ShardWriter
from quark.config.layer import ACTIVATIONS, PARAMETERS, Slot
from quark.errors import UnsupportedError
from quark.models.hf.internals import set_source, tied_on_loading
from quark.models.layers import share_codes
from quark.models.plan.attention import AttentionRow
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan

_WHOLE = Region()
_MADE_HERE = (
    "They were finite before, so an algorithm, a scale or the dtype of the model caused this. Choose another dtype (bfloat16), scheme or "
    "algorithm, or report it with the name of the model"
)


class CheckpointExporter(Exporter):
    """The base class of exporters that write a model layer by layer.

    Either the whole model is quantized before it is written, or each block is written as soon as it is
    quantized. Exports can be resumed, and several processes can write one export together. A subclass defines
    a layout: the method `quantization_config` returns the object for ``config.json``, and other members
    define the tensors of a layer. If only the names of tensors differ from the defaults, define
    `tensor_name`. If your layout packs codes in its own way, set ``storage`` to a `LayerStorage`. In all
    other cases, define `layer_tensors`, and also `read_layer`, which reads the tensors back. Tensors outside
    quantized layers are written unchanged.

    Attributes:
        layout: Name of the layout, for messages.
        storage: The object that packs codes. It is None if the number formats pack codes.
        states_with_attention: Whether every attention module stores the scales of its queries, keys and
            values, such as ``k_scale`` with the shape ``[1]``. If False, the projections store these scales,
            except if a projection is fused.
    """

    streams = resumes = shares = True
    layout: ClassVar[str] = ""
    storage: LayerStorage | None = None
    states_with_attention: ClassVar[bool] = False

    @abstractmethod
    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        """Return the ``quantization_config`` to write into ``config.json``."""

    def tensor_name(self, slot: Slot, suffix: str) -> str:
        """Return the last part of the name of a stored tensor.

        For the slot of the weight and the suffix ``"scale"``, this is ``"weight_scale"`` by default. The
        suffix of codes is ``""``. For parameters that stay float, the exporter does not call this method. It
        stores them as ``"weight"`` and ``"bias"``.
        """
        return f"{slot.checkpoint_prefix}_{suffix}" if suffix else slot.checkpoint_prefix

    def layer_tensors(self, layer: ExportedLayer) -> Mapping[str, Tensor]:
        """Return the tensors to store for a quantized layer.

        A key of the dictionary is the last part of a tensor's name. The tensors must represent the weight of
        the layer. If the dictionary is empty, the weight is written unchanged. If it has no key ``"bias"``,
        the bias is written unchanged. Several threads call this method at the same time for different layers.

        Args:
            layer: The layer. If its tensors are on the meta device, return meta tensors with the final names,
                shapes and dtypes.
        """
        if self.storage is not None:
            return layer.stored_by(self.storage)
        tensors: dict[str, Tensor] = {}
        for slot in (*PARAMETERS, *ACTIVATIONS):
            tensors |= {self._name(layer, slot, suffix): tensor for suffix, tensor in layer.packed(slot).items()}
        return tensors

    def read_layer(self, layer: ExportedLayer, tensors: Mapping[str, Tensor]) -> None:
        """Set the parameters and scales of a layer from written tensors.

        This is the inverse of `layer_tensors`.

        Args:
            layer: The layer. It has float weights and no scales.
            tensors: The written tensors, on the device of the layer. The keys are those of `layer_tensors`.
        """
        if self.storage is not None:
            if layer.is_quantized(Slot.weight):
                self.storage.restored(layer.config, layer.shape, tensors).put_into(layer.layer, layer.name, keeps_codes=False)
            return
        for slot in (*PARAMETERS, *ACTIVATIONS):
            names = {suffix: self._name(layer, slot, suffix) for suffix in layer.suffixes(slot)}
            layer.set_packed(slot, {suffix: tensors[name] for suffix, name in names.items() if name in tensors})

    def _name(self, layer: ExportedLayer, slot: Slot, suffix: str) -> str:
        """Return the last part of the name under which a tensor of ``layer`` is stored."""
        return self.tensor_name(slot, suffix) if layer.is_quantized(slot) else slot.value

    def reasons(self, content: CheckpointContent, options: ExportOptions) -> Iterable[tuple[str, str]]:
        """Yield the reasons why the layout cannot represent a model.

        Each item is a pair of the name of a layer and a reason. The name is ``""`` if the reason concerns the
        whole model. If ``storage`` is None, the default implementation yields nothing. Otherwise it yields
        the reasons of the `LayerStorage` (`LayerStorage.why_not`), and a reason for each part of the model
        that no `LayerStorage` can store.
        """
        if self.storage is None:
            return
        if options.weight_format != "real_quantized":
            yield "", f"it stores codes, but weight_format={options.weight_format} asks for rounded values"
        for row in content.plan.quantized:
            reason = None if is_float(row) else _why_not(self.storage, row)
            if reason is not None:
                yield row.name, reason

    def warn(self, content: CheckpointContent, options: ExportOptions) -> None:
        """Log a warning if a runtime that loads the export would compute other results than the model.

        quark calls this method when an export begins. The default implementation logs nothing.
        """

    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
        """Implement `Exporter.check`. The error message contains all `reasons`."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.reasons(content, options):
            reasons.setdefault(reason, []).append(name)
        if reasons:
            what = "; ".join(reason + (f" ({folded(names)})" if any(names) else "") for reason, names in reasons.items())
            raise UnsupportedError(f"the layout '{self.layout or type(self).__name__}' cannot hold this model: {what}")

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """Implement `Exporter.export`."""
        with self.stream(content, content.model, out, options) as stream:
            stream.write(Block("", content.model))
            stream.finish(content)

    @contextmanager
    def stream(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[BlockStream]:
        """Implement `Exporter.stream`."""
        announced = self.announced(content, skeleton, options)
        self.warn(content, options)
        with ShardWriter(ShardLayout.of(announced, options.max_shard_bytes), out) as writer:
            yield _Stream(self, content, options, out, writer)

    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> list[Mapping[str, Tensor]]:
        """Implement `Exporter.announced`.

        Raise UnsupportedError if the layout cannot represent the model.
        """
        self.check(content, skeleton, options)
        return [part.meta for part in (*self.parts(skeleton, content.plan, options), *carried_parts(content))]

    def parts(self, model: nn.Module, plan: QuantPlan, options: ExportOptions, region: Region = _WHOLE) -> list[Part]:
        """Return the tensors of a region of a quantized model, in the order in which they are written.

        By default, the region is the whole model. All tensors of a layer are in one part.
        """
        modules = region.modules(model)
        layers = exported_layers(model, plan, options, modules)
        announced = {name: self.layer_tensors(layer.on_meta()) for name, layer in layers.items()}
        attention = attention_quantizers(modules)
        as_they_are = _written_as_they_are(layers, announced)
        plain = plain_parts(region.state(model), [*layers, *attention], as_they_are, tied_on_loading(model))
        for name in same_weights(model, layers):  # loading ties this layer to another, and only the other layer stores the weight
            of_weight = {self._name(layers[name], Slot.weight, suffix) for suffix in layers[name].suffixes(Slot.weight)}
            announced[name] = {leaf: tensor for leaf, tensor in announced[name].items() if leaf not in of_weight}
        coded = [self._part(layer, announced[name]) for name, layer in layers.items() if announced[name]]
        states = state_parts(model, self._with_states(plan), layers, options, as_vectors=self.states_with_attention)
        return [*plain, *coded, *probability_parts(attention, options), *states]

    def write_config(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """Write ``config.json`` with the `quantization_config`.

        Also write companions, such as a tokenizer.
        """
        config = _config_of(content, self.quantization_config(content, options))
        text = json.dumps(config, indent=2, sort_keys=True) + "\n" if isinstance(config, dict) else config.to_json_string()
        (out / "config.json").write_text(text, encoding="utf-8", newline="\n")
        save_companions(content.model, out, options.tokenizer)

    def _part(self, layer: ExportedLayer, meta: Mapping[str, Tensor]) -> Part:
        """Return the part with the tensors of ``layer``. The names in ``meta`` are relative to the layer."""
        under = f"{layer.name}."
        made = {under + n: t for n, t in meta.items()}
        return Part(made, lambda: {under + n: t for n, t in self.layer_tensors(layer).items()}, layer.device)

    def _with_states(self, plan: QuantPlan) -> list[AttentionRow]:
        """Return the attention modules that store the scales of queries, keys and values themselves."""
        return [row for row in plan.attentions if row.fused or self.states_with_attention]

    @torch.no_grad()
    def read(self, model: nn.Module, plan: QuantPlan, options: ExportOptions, region: Region, written: ShardWriter) -> None:
        """Set weights, scales and other tensors of a region in place, from written tensors.

        Args:
            model: The model. It has quantized layers and quantizers of attention, but the weights are float,
                and the quantizers have no scales.
            plan: Plan of the model.
            options: Options with which the tensors were written.
            region: The region to read, such as a block.
            written: The writer that reads the written tensors.
        """
        modules = region.modules(model)
        layers = exported_layers(model, plan, options, modules)
        plain = _written_as_they_are(layers, {name: self.layer_tensors(layer.on_meta()) for name, layer in layers.items()})
        attention = attention_quantizers(modules)
        inside = tuple(f"{name}." for name in (*layers, *attention))
        for name, tensor in region.state(model).items():
            if name in written and (name in plain or not name.startswith(inside)):
                tensor.copy_(written.read(name))  # in place: tied modules share it
        sources = same_weights(model, layers)
        for name, layer in layers.items():
            paths = {leaf: f"{owner}.{leaf}" for owner in (sources.get(name, name), name) for leaf in written.names_under(owner)}
            self.read_layer(layer, {leaf: written.read(path).to(layer.device) for leaf, path in paths.items()})
        for name, source in sources.items():
            share_codes(layers[name].layer, layers[source].layer)
        set_attention_scales(attention, self._with_states(plan), written, options, as_vectors=self.states_with_attention)


class _Stream(BlockStream):
    """A `BlockStream` that writes with a `CheckpointExporter`."""

    def __init__(
        self, exporter: CheckpointExporter, content: CheckpointContent, options: ExportOptions, directory: Path, writer: ShardWriter
    ) -> None:
        self._exporter = exporter
        self._content = content
        self._options = options
        self._directory = directory
        self._writer = writer
        self._buffers = buffers_of(content.model)
        self._early: set[str] = set()
        self.encodes = not options.stores_values

    @cached_property
    def _blocks(self) -> tuple[str, ...]:
        """The full names of the decoder blocks. If the whole model is one block, the only name is ``""``."""
        return tuple(block.name for block in self._content.blocks)

    def write_float(self) -> None:
        """Implement `BlockStream.write_float`."""
        parts = self._parts(None, without=[row.name for row in self._content.plan.quantized])
        self._early = {name for part in parts for name in part.meta}
        if parts:
            self._writer.write_beside(self._made(Part.joined(parts)))

    def write(self, block: Block | None) -> None:
        """Implement `BlockStream.write`."""
        for part in small_joined(self._parts(block)):
            self._writer.write(self._made(part))

    def _parts(self, block: Block | None, without: Iterable[str] = ()) -> list[Part]:
        """Return the parts of a block that `write_float` has not written.

        Args:
            block: The block. None means everything outside all blocks.
            without: Full names of modules whose parts are left out.
        """
        if block is None and "" in self._blocks:
            return []  # the whole model is one block, so there is nothing outside it
        region = Region(without=(*self._blocks, *without)) if block is None else Region(block.name)
        parts = self._exporter.parts(self._content.model, self._content.plan, self._options, region)
        # A tied parameter was announced only once, under its first name.
        return [p for p in parts if not self._early.issuperset(p.meta) and all(name in self._writer for name in p.meta)]

    def _made(self, part: Part) -> Mapping[str, Tensor]:
        """Compute and return the tensors of a part.

        Raise an error if they contain NaN or Inf that the source model does not contain.
        """
        made = part.make()
        refuse_non_finite(made, self._buffers, lambda _: _MADE_HERE, warns=False)
        return {name: made[name] for name in part.meta}

    def when_stored(self, then: Callable[[Mapping[str, str]], None]) -> None:
        """Implement `BlockStream.when_stored`."""
        self._writer.when_stored(then)

    def adopt(self, block: Block, checksums: Mapping[str, str]) -> Sequence[str]:
        """Implement `BlockStream.adopt`."""
        if self._options.kv_cache_group:
            raise UnsupportedError(
                "an export with the exporter's option kv_cache_group cannot be resumed, because the exporter merges cache scales only when "
                "it writes them. Set kv_cache_group in the configuration instead, so that the scales are merged during calibration"
            )
        return self._writer.adopt(checksums)

    def read(self, block: Block) -> None:
        """Implement `BlockStream.read`."""
        self._exporter.read(self._content.model, self._content.plan, self._options, Region(block.name), self._writer)

    def written(self) -> Mapping[str, str]:
        """Implement `BlockStream.written`."""
        return self._writer.written()

    def count_as_written(self, names: Mapping[str, str]) -> None:
        """Implement `BlockStream.count_as_written`."""
        self._writer.count_as_written(names)

    def finish(self, content: CheckpointContent) -> None:
        """Implement `BlockStream.finish`."""
        for part in small_joined(carried_parts(content)):
            self._writer.write(part.make())
        self._writer.finish()
        self._exporter.write_config(content, self._directory, self._options)


def _why_not(storage: LayerStorage, row: PlanRow) -> str | None:
    """Return why ``storage`` cannot store the layer of ``row``, or None if it can."""
    if row.layer_type != "linear" or len(row.shape) != 2:
        return f"it has no place for a quantized layer of the type {row.layer_type}"
    return "it has no place for a quantized bias" if row.quantized_to.bias is not None else storage.why_not(row.quantized_to, row.shape)


def _written_as_they_are(layers: Mapping[str, ExportedLayer], tensors: Mapping[str, Collection[str]]) -> set[str]:
    """Return the full names of those parameters and buffers of ``layers`` that are stored unchanged.

    Args:
        layers: A dictionary from full name to layer.
        tensors: A dictionary from the full name of a layer to the names of the tensors that
            `CheckpointExporter.layer_tensors` returns for this layer.
    """
    names: set[str] = set()
    for name, layer in layers.items():
        own = [*layer.layer.other_state()]
        own += [] if "bias" in tensors[name] else ["bias"]
        own += [] if tensors[name] else ["weight"]
        names |= {f"{name}.{tensor}" for tensor in own}
    return names


def _config_of(content: CheckpointContent, quantization: dict[str, Any]) -> Any:
    """Return the content of ``config.json``, with ``quantization`` as the ``quantization_config``.

    The other content is the config of the model, or the name of the model's class if there is no config.
    """
    model: Any = content.model
    if not hasattr(getattr(model, "config", None), "to_json_file"):
        return {"architectures": [type(model).__name__], "quantization_config": quantization}
    config = copy.deepcopy(model.config)
    set_source(config, "")  # otherwise transformers would write the local path of the model
    if not {one.__name__ for one in type(model).__mro__}.intersection(config.architectures or ()):  # for a model loaded as another class
        config.architectures = [type(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if is_tied_apart(model):
        config.tie_word_embeddings = False
    config.quantization_config = quantization
    return config
