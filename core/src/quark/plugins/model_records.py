"""Records about models: families (templates), layer types, quantization modes, graph operators."""

from __future__ import annotations

import re
from typing import Any

import attrs

from quark.base.lazy import Reference, as_optional_reference, as_reference
from quark.plugins.record_fields import (
    as_strings,
    check_module,
    check_name,
    check_run_time_name,
    class_reference,
    function_reference,
    value_reference,
)
from quark.plugins.records import Record

_ARCHITECTURE = value_reference("quark.config.architecture:Architecture")
_OPERATOR = re.compile(r"\w+::\w+")


@attrs.frozen(kw_only=True)
class TemplateRecord(Record):
    """A model family; its name is ``config.model_type``.

    Attributes:
        architecture: Reference to a `quark.config.architecture.Architecture`.
        modeling: Module that registers the model class with transformers (``AutoConfig.register``,
            ``AutoModelForCausalLM.register``), such as ``"acme_quant.modeling"``. It is imported when a
            ``config.json`` of this model type is read. None if transformers knows the class.
        example: Reference to a function that takes a model type and returns a tiny float model, on which the
            conformance suite checks the facts (see `quark_devkit`). If None, and if transformers knows the
            family, the suite builds one from a small configuration.
    """

    architecture: Reference | None = attrs.field(converter=as_reference, metadata=_ARCHITECTURE)
    modeling: str | None = attrs.field(default=None, validator=attrs.validators.optional(check_module))
    example: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())


@attrs.frozen(kw_only=True)
class RunTimeTemplate(TemplateRecord):
    """A template that a program registers for itself; its name is any ``config.model_type``.

    Attributes:
        architecture: Facts about the family; None if they are inferred from a model's modules.
        template: The `quark.config.templates.LLMTemplate` that was registered.
    """

    name: str = attrs.field(validator=check_run_time_name)
    architecture: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=_ARCHITECTURE)
    template: Any = None


@attrs.frozen(kw_only=True)
class LayerTypeRecord(Record):
    """A class of float layers, and the class that replaces it in a quantized model.

    The record applies to the class itself and to subclasses that override nothing; other subclasses may
    compute something else. The check does not import the class's module.

    Attributes:
        layer: Reference to the float class, a ``torch.nn.Module`` with a parameter ``weight``, and perhaps
            ``bias``.
        quantized: Reference to a subclass of `quark.models.layers.QuantizedLayer`. None for layers that stay
            float, although they are subclasses of ``torch.nn.Linear`` that compute the same.
        planned_as: Name of the layer type that configurations, plans and algorithms use for such layers; None
            means their own. A layer that is planned as ``"linear"`` is rounded by any algorithm for linear
            layers.
        transposed: Whether the float class keeps its weight ``[in, out / groups, …]``, input channels first,
            where ``groups`` is an attribute of the layer or 1. Channels, groups and scales are counted on
            ``[out, in / groups, …]``.
        lookup: Whether its input is indices, which are not quantized; this implies ``by_name``.
        by_name: Whether such layers are quantized only if a pattern or a type names them, and not by a global
            configuration.
    """

    layer: Reference = attrs.field(converter=as_reference, metadata=class_reference("torch.nn:Module"))
    quantized: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=class_reference("quark.models.layers.quantized_layers:QuantizedLayer")
    )
    planned_as: str | None = attrs.field(default=None, validator=attrs.validators.optional(check_name))
    transposed: bool = False
    lookup: bool = False
    by_name: bool = attrs.field(default=attrs.Factory(lambda self: self.lookup, takes_self=True))

    @by_name.validator
    def _check_by_name(self, _: Any, by_name: bool) -> None:
        if self.lookup and not by_name:
            raise ValueError(f"'{self.name}' takes indices (lookup), and such layers are quantized only by name: leave by_name out")


def _check_operators(_: Any, attribute: Any, values: tuple[str, ...]) -> None:
    if not values:
        raise ValueError(f"{attribute.name} is empty: name an operator of torch, such as 'aten::add'")
    for value in values:
        if not _OPERATOR.fullmatch(value):
            raise ValueError(f"{attribute.name} holds {value!r}: write 'namespace::name', as torch's schemas do, without the overload")


@attrs.frozen(kw_only=True)
class QuantModeRecord(Record):
    """A quantization mode: a way to quantize a model in memory other than layer by layer.

    ``QConfig(quant_mode=NAME)`` chooses it.

    Attributes:
        plan: Reference to a function ``plan(model, config)`` that returns a printable plan and changes
            nothing.
        quantize: Reference to a function ``quantize(model, config, data)`` that quantizes a model and returns
            it, with the attributes ``quant_config``, ``quark_plan`` and ``quark_quantized``. ``data`` are the
            calibration data given to `ModelQuantizer.quantize_model`.

    Raises:
        ValueError: As `Record` does.
    """

    plan: Reference = attrs.field(converter=as_reference, metadata=function_reference())
    quantize: Reference = attrs.field(converter=as_reference, metadata=function_reference())


@attrs.frozen(kw_only=True)
class GraphOpRecord(Record):
    """An operator in the graph of a model, and which of its tensors FX graph mode quantizes.

    Tensors have the names of the arguments in the operator's schema
    (``torch.ops.aten.linear.default._schema``).

    Attributes:
        operators: Full names without overloads, such as ``("aten::add",)``. An in-place operator, such as
            ``aten::add_``, is replaced by the plain one before records are looked up.
        modules: Names of the module classes that consist of this one operator, such as ``("Conv2d",)``.
            ``layer_type_quant_config`` may use them too, and the operator in such a module has the module's
            name.
        inputs: Arguments that are activations; if empty, every tensor but ``weight`` and ``bias``.
        layer_type: Name of the registered layer type (`LayerTypeRecord`) that computes the same. Its weight,
            and activations with scales of channels or groups, are then quantized as in eager mode. None if
            there is none.
        weight: Argument that is the weight of such a layer; None if there is none.
        bias: Argument that is its bias.
        moves_values: Whether each output value is one of the inputs' values, or 0, as for ``cat`` and
            ``relu``. Inputs and outputs then share a quantizer, if it has one static scale.
        continues: Whether the operator is computed together with the one in front of it, as with ``relu``. If
            nothing else reads the tensor between the two, that tensor is not quantized.
        example: Reference to a function that takes the record's name and returns a module and a tuple of its
            arguments. The module's graph has this operator; for the conformance suite.

    Raises:
        ValueError: As `Record` does; or an operator is not written in torch's form; or one of weight and
            layer type is missing.
    """

    operators: tuple[str, ...] = attrs.field(converter=as_strings, validator=_check_operators)
    modules: tuple[str, ...] = attrs.field(default=(), converter=as_strings)
    inputs: tuple[str, ...] = attrs.field(default=(), converter=as_strings)
    layer_type: str | None = attrs.field(default=None, validator=attrs.validators.optional(check_name))
    weight: str | None = None
    bias: str | None = None
    moves_values: bool = False
    continues: bool = False
    example: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())

    def __attrs_post_init__(self) -> None:
        if (self.weight is None) != (self.layer_type is None) or (self.bias is not None and self.weight is None):
            raise ValueError(
                f"the operator '{self.name}' sets only one of weight and layer_type, or a bias without a weight: set both, or none"
            )
        if self.weight is not None and self.moves_values:
            raise ValueError(f"the operator '{self.name}' has a weight, so it does not only move values: leave weight or moves_values out")

    @property
    def type_names(self) -> tuple[str, ...]:
        """Names of the operator in ``layer_type_quant_config``."""
        return (self.name, *self.aliases, *self.modules)
