"""Records of model families (templates), layer types, quantization modes and graph operators."""

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
    """A model family. The name of the record is the ``config.model_type`` of its models.

    Attributes:
        architecture: Reference to an instance of `quark.config.architecture.Architecture`.
        modeling: Name of the module that registers the model class with transformers
            (``AutoConfig.register``, ``AutoModelForCausalLM.register``), such as ``"acme_quant.modeling"``.
            quark imports the module when it reads a ``config.json`` of this model type. None if transformers
            has the class already.
        example: Reference to a function that takes a model type and returns a tiny float model. The
            conformance suite compares ``architecture`` with this model (see `quark_devkit`). If it is None
            and transformers has a class for the family, the suite builds a model from a small configuration.
    """

    architecture: Reference | None = attrs.field(converter=as_reference, metadata=_ARCHITECTURE)
    modeling: str | None = attrs.field(default=None, validator=attrs.validators.optional(check_module))
    example: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())


@attrs.frozen(kw_only=True)
class RunTimeTemplate(TemplateRecord):
    """A template that a program registers while the program runs. Its name may be any ``config.model_type``.

    Attributes:
        architecture: Reference to the facts about the family. None if quark infers the facts from the modules
            of a model.
        template: The `quark.config.templates.LLMTemplate` that the program registered.
    """

    name: str = attrs.field(validator=check_run_time_name)
    architecture: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=_ARCHITECTURE)
    template: Any = None


@attrs.frozen(kw_only=True)
class LayerTypeRecord(Record):
    """A class of float layers, and the class that replaces it in a quantized model.

    The record applies to layers of the class itself, and to layers of subclasses that override nothing. It
    does not apply to subclasses that override something, because they may compute other outputs. To find the
    record of a layer, quark compares class names and does not import the module of the class.

    Attributes:
        layer: Reference to the float class, a subclass of ``torch.nn.Module`` with a parameter ``weight`` and
            optionally a parameter ``bias``.
        quantized: Reference to a subclass of `quark.models.layers.QuantizedLayer`. None if such layers must
            stay float, although they compute the same as ``torch.nn.Linear``, from which they inherit.
        planned_as: Name of the layer type that configurations, plans and algorithms use for such layers, such
            as ``"linear"``. All algorithms for linear layers can round a layer that is planned as
            ``"linear"``. None if such layers are planned under the name of this record.
        transposed: Whether the weight of the float class has the input channels first, with the shape
            ``[in, out / groups, …]``. ``groups`` is the layer's attribute ``groups``, or 1 if the layer has
            no such attribute. The axes of a configuration refer to the shape ``[out, in / groups, …]``.
        lookup: Whether the input of the layer consists of indices, which cannot be quantized. ``by_name`` is
            then True.
        by_name: Whether such layers are quantized only if the configuration has a pattern or a layer type for
            them. The global configuration does not apply to them.
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
            raise ValueError(f"'{self.name}' sets lookup=True, so by_name must be True. Leave by_name out")


def _check_operators(_: Any, attribute: Any, values: tuple[str, ...]) -> None:
    if not values:
        raise ValueError(f"{attribute.name} is empty: name an operator of torch, such as 'aten::add'")
    for value in values:
        if not _OPERATOR.fullmatch(value):
            raise ValueError(f"{attribute.name} contains {value!r}: write 'namespace::name', as torch's schemas do, without the overload")


@attrs.frozen(kw_only=True)
class QuantModeRecord(Record):
    """A quantization mode. It quantizes a model in memory in another way than layer by layer.

    A user chooses the mode with ``QConfig(quant_mode=NAME)``.

    Attributes:
        plan: Reference to a function ``plan(model, config)`` that returns an object to print as the plan of
            the run. The function must not change the model.
        quantize: Reference to a function ``quantize(model, config, data)`` that quantizes a model and returns
            it. The function sets the attributes ``quant_config``, ``quark_plan`` and ``quark_quantized`` of
            the model. ``data`` is the calibration data that the user passed to
            `ModelQuantizer.quantize_model`.

    Raises:
        ValueError: A field is malformed (see `Record`).
    """

    plan: Reference = attrs.field(converter=as_reference, metadata=function_reference())
    quantize: Reference = attrs.field(converter=as_reference, metadata=function_reference())


@attrs.frozen(kw_only=True)
class GraphOpRecord(Record):
    """An operator in the graph of a model. The record says which of its tensors FX graph mode quantizes.

    A tensor is named by the argument in the operator's schema (``torch.ops.aten.linear.default._schema``).

    Attributes:
        operators: Full names of the operator without overloads, such as ``("aten::add",)``. Do not list
            in-place operators, such as ``aten::add_``: quark replaces them by the plain operators first.
        modules: Names of the module classes that consist of this one operator, such as ``("Conv2d",)``.
            ``layer_type_quant_config`` accepts these names too. The operator in such a module has the
            module's name.
        inputs: Names of the arguments that are activations. If empty, every tensor is an activation except
            ``weight`` and ``bias``.
        layer_type: Name of the registered layer type (`LayerTypeRecord`) that computes the same as the
            operator. The weight is then quantized as in eager mode, and so are activations that have scales
            per channel or per group. None if no layer type computes the same.
        weight: Name of the argument that is the weight of the layer, or None if the operator has no weight.
        bias: Name of the argument that is the bias of the layer, or None if the operator has no bias.
        moves_values: Whether each output value is 0 or one of the input values, as for ``cat`` and ``relu``.
            Inputs and outputs then share a quantizer if the quantizer has one static scale.
        continues: Whether the operator is computed together with the operator before it, as ``relu`` is. If
            no other operator reads the output of the first of these two operators, this output is not
            quantized.
        example: Reference to a function that takes the record's name. It returns a module whose graph has
            this operator, and a tuple of arguments for the module. The conformance suite calls the function.

    Raises:
        ValueError: A field is malformed (see `Record`), or an operator is not written in the form of torch's
            schemas. Or the record has only one of ``weight`` and ``layer_type``, or ``bias`` without
            ``weight``.
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
                f"the operator '{self.name}' sets only one of weight and layer_type, or sets bias without weight. "
                "Set weight and layer_type, or leave weight, layer_type and bias out"
            )
        if self.weight is not None and self.moves_values:
            raise ValueError(f"the operator '{self.name}' sets both weight and moves_values. Leave one of them out")

    @property
    def type_names(self) -> tuple[str, ...]:
        """The names that ``layer_type_quant_config`` accepts for the operator."""
        return (self.name, *self.aliases, *self.modules)
