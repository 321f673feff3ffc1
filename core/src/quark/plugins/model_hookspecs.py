"""Hooks for things that depend on models: families, layer types, quantization modes, graph operators."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from quark.plugins.model_records import GraphOpRecord, LayerTypeRecord, QuantModeRecord, TemplateRecord

PROJECT = "quark"
hookspec = pluggy.HookspecMarker(PROJECT)


class ModelHooks:
    """Hooks about models, which `quark.plugins.hookspecs.QuarkHooks` inherits."""

    @hookspec
    def quark_register_templates(self) -> Iterable[TemplateRecord]:  # type: ignore[empty-body]
        """Return the model families of a plugin, each named as its ``config.model_type``.

        Each record points at a `quark.config.architecture.Architecture`. If transformers does not know the
        family, the record also names the module that registers its model class (``modeling``).

        Example::

            # acme_quant/plugin.py
            from quark.plugins import TemplateRecord, hookimpl

            @hookimpl
            def quark_register_templates():
                yield TemplateRecord(
                    name="acme_lm", summary="models of Acme", architecture="acme_quant.families:ACME_LM"
                )

            # acme_quant/families.py
            from quark.config.architecture import Architecture

            ACME_LM = Architecture(
                model_type="acme_lm",
                decoder_blocks="model.layers",
                attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                attention_output="self_attn.o_proj",
                kv_layers_name=("*k_proj", "*v_proj"),
                exclude_layers_name=("lm_head",),
            )
        """

    @hookspec
    def quark_register_layer_types(self) -> Iterable[LayerTypeRecord]:  # type: ignore[empty-body]
        """Return the layer types of a plugin: the quantized classes of float layers. Core has this hook too.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import LayerTypeRecord, hookimpl

            @hookimpl
            def quark_register_layer_types():
                yield LayerTypeRecord(
                    name="acme_gated",
                    summary="linear layers with a gate",
                    layer="acme_quant.layers:Gated",
                    quantized="acme_quant.layers:QuantGated",
                    planned_as="linear",
                )

            # acme_quant/layers.py
            from torch import nn
            from quark.models.layers import QuantizedLayer

            class Gated(nn.Linear):
                pass

            class QuantGated(QuantizedLayer, Gated):
                pass
        """

    @hookspec
    def quark_register_quant_modes(self) -> Iterable[QuantModeRecord]:  # type: ignore[empty-body]
        """Return the quantization modes of a plugin: ways to quantize a model other than layer by layer.

        Each record points at two functions, which `ModelQuantizer` calls for ``QConfig(quant_mode=NAME)``.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import QuantModeRecord, hookimpl

            @hookimpl
            def quark_register_quant_modes():
                yield QuantModeRecord(
                    name="acme_half",
                    summary="casts a model to float16",
                    plan="acme_quant.half:plan",
                    quantize="acme_quant.half:quantize",
                )

            # acme_quant/half.py
            def plan(model, config):
                return "float16"

            def quantize(model, config, data=None):
                model.quant_config, model.quark_plan = config, plan(model, config)
                model.quark_quantized = True
                return model.half()
        """

    @hookspec
    def quark_register_graph_ops(self) -> Iterable[GraphOpRecord]:  # type: ignore[empty-body]
        """Return the operators of a plugin that FX graph mode quantizes.

        The distribution quark-graph has this mode, and registers torch's operators by this hook. Each record
        names an operator as in torch's schemas, and its activations, weight and bias.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import GraphOpRecord, hookimpl

            @hookimpl
            def quark_register_graph_ops():
                yield GraphOpRecord(
                    name="acme_mish", summary="Mish activation", operators=("aten::mish",), modules=("Mish",)
                )
        """
