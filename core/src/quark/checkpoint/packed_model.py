"""Functions that change a float model so that the tensors of a checkpoint can be loaded into the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from torch import nn

from quark.algorithms.branching import BranchSite, branching_of
from quark.checkpoint.provenance import refuse_unreadable
from quark.checkpoint.restorers import restorers_of
from quark.config.layer import QLayerConfig, Slot
from quark.config.model import QConfig
from quark.models.hf.attention_switch import switch_attention
from quark.models.layers import counts_as
from quark.models.layers.attention import PROBABILITIES, STORED_STATES
from quark.models.layers.coded_layer import packed_scales
from quark.models.layers.layers_from_codes import Packed
from quark.models.layers.packed_layers import PackedLayer, PackedQuantizer, PackedScales, ScalesOf, as_vector
from quark.models.plan.attention import AttentionRow, attention_rows
from quark.models.plan.family import architecture_of
from quark.models.plan.mixtures import separate_experts
from quark.models.plan.quant_plan import QuantPlan, plan_rows, refuse_misfits
from quark.models.plan.rules import layer_config_for
from quark.numbers import quantizer_for

PackLayer = Callable[[nn.Module, QLayerConfig, str], Packed]
"""A function that creates the packed layer for a float layer. Its arguments are the float layer, the
quantization of the layer, and its full name.
"""


def pack_model(
    model: nn.Module,
    quant_config: QConfig,
    pack_method: str = "reorder",
    *,
    pack_layer: PackLayer | None = None,
    states_with_attention: bool = False,
) -> QuantPlan:
    """Replace every layer that the configuration quantizes by a `Packed` layer, in place. Return the plan.

    Attention modules get quantizers. If the configuration contains an algorithm that adds branches, hooks or
    other parts to the model, these parts are added again.

    Args:
        model: A float model. Its weights are not used, and may be on any device.
        quant_config: The configuration of the checkpoint.
        pack_method: Packing order of 4-bit codes in a word, ``"reorder"`` or ``"order"``.
        pack_layer: A function that creates a packed layer. If None, each layer becomes a `PackedLayer`, in
            which the number formats define the names and the packing of the tensors.
        states_with_attention: Whether every attention module stores the scales of its keys and values, such
            as ``k_scale``. If False, the projections store these scales, except if a projection is fused.

    Returns:
        The plan of the model. It equals the plan of the run that made the checkpoint.

    Raises:
        UnsupportedError: The configuration quantizes attention, but the model cannot use quark's attention
            functions.
        MissingPluginError: An algorithm that runs as part of the model is not installed.
        ConfigError, UnknownNameError: The configuration does not fit the model, or needs a format that is not
            installed.
        CheckpointError: The checkpoint stores a format in a layout version that the installed distribution
            does not read.
    """
    refuse_unreadable(quant_config)
    separate_experts(model, quant_config)
    for restorer in restorers_of(quant_config):
        restorer.restore(model, quant_config)
    rows = plan_rows(model, quant_config)
    refuse_misfits(rows)
    architecture = architecture_of(model)
    attentions = attention_rows(model, rows, quant_config, architecture)
    branching = branching_of(quant_config)
    in_attention = {layer for a in attentions for layer, _ in a.states.values()}
    packed_of: dict[nn.Module, Packed] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        planned_as = counts_as(layer)
        if planned_as is None:
            continue
        config = layer_config_for(quant_config, name, planned_as).config
        if config is not None:
            # The attention module quantizes this output, not the layer, although the scales are stored with
            # the layer.
            own = attrs.evolve(config, output_tensors=None) if name in in_attention else config
            if layer not in packed_of:
                holds_values = quant_config.weight_format == "fake_quantized"
                made = PackedLayer(layer, own, pack_method, name, holds_values) if pack_layer is None else pack_layer(layer, own, name)
                packed_of[layer] = made
                if branching is not None:
                    branching.add_to(made, BranchSite.of(name, layer, own))
            model.set_submodule(name, packed_of[layer])
    stored = [attrs.evolve(row, fused=True) for row in attentions] if states_with_attention else attentions
    _map_attention(model, stored, pack_method, eager=quant_config.softmax_quant_spec is not None, as_vectors=states_with_attention)
    return QuantPlan(rows, quant_config, architecture, attentions=attentions)


def _map_attention(model: nn.Module, attentions: Sequence[AttentionRow], order: str, *, eager: bool, as_vectors: bool) -> None:
    """Add packed quantizers to attention modules, and let these modules call quark's attention functions."""
    for row in attentions:
        module = model.get_submodule(row.name)
        if row.probabilities is not None:
            setattr(module, PROBABILITIES, PackedQuantizer(row.probabilities, order, largest=1.0))
        for state, (layer, spec) in row.states.items():
            tensors = packed_scales(quantizer_for(spec, activation=True), row.state_shape, order)
            stored: PackedScales | ScalesOf
            if row.fused:
                stored = ScalesOf(module, STORED_STATES[state], {s: as_vector(t) if as_vectors else t for s, t in tensors.items()})
            else:
                stored = PackedScales(tensors, spec)
                setattr(model.get_submodule(layer), Slot.output_tensors.quantizer_attribute, stored)
            setattr(module, state, PackedQuantizer(spec, order, stored, shape=row.state_shape))
    if attentions:
        switch_attention(model, [a.name for a in attentions], eager=eager)
