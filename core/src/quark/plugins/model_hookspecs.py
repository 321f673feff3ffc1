"""Hooks that register model families, layer types, quantization modes and graph operators."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from quark.plugins.model_records import GraphOpRecord, LayerTypeRecord, QuantModeRecord, TemplateRecord

PROJECT = "quark"
hookspec = pluggy.HookspecMarker(PROJECT)


class ModelHooks:
    """Hooks that concern models. `quark.plugins.hookspecs.QuarkHooks` inherits from this class."""

    @hookspec
    def quark_register_templates(self) -> Iterable[TemplateRecord]:  # type: ignore[empty-body]
        """Return the model families of a plugin. The name of a family is its ``config.model_type``.

        Each record points at an instance of `quark.config.architecture.Architecture`. If transformers has no
        model class for the family, the record also names a module (``modeling``) that registers the model
        class with transformers.

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
        """Return the layer types of a plugin. quark-core registers the layer types of torch by this hook too.

        Each record names a class of float layers, and the class that replaces it in a quantized model.

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
        """Return the quantization modes of a plugin. A mode quantizes a model in another way than layer by
        layer.

        A user chooses a mode with ``QConfig(quant_mode=NAME)``. Each record points at two functions that
        `ModelQuantizer` then calls: ``plan`` and ``quantize``.

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

        The distribution quark-graph provides FX graph mode and registers the operators of torch by this hook.
        Each record names an operator in the form of torch's schemas. It also says which arguments of the
        operator are activations, weight and bias.

        Example::

            # acme_quant/plugin.py
            from quark.plugins import GraphOpRecord, hookimpl

            @hookimpl
            def quark_register_graph_ops():
                yield GraphOpRecord(
                    name="acme_mish", summary="Mish activation", operators=("aten::mish",), modules=("Mish",)
                )
        """
