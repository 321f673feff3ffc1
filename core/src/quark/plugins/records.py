"""What a plugin registers: frozen records that point at code by name. Making one imports nothing.

Every record has a name (see `quark.names`), perhaps aliases, a one-line summary, a stability, and ``exports``: the names of AMD
Quark's public API that come with it, each a reference. An export is keyed by a plain name (``"Int4PerGroupSpec"``: every public module
that has plugins' names has it) or by module and name (``"quark.torch.algorithm.awq.awq:AwqProcessor"``: that module then exists).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from quark.lazy import LazyRef, Reference, as_optional_reference, as_reference
from quark.names import NAME_RULE, is_valid_name
from quark.plugins.api_version import ApiRange, as_api_range
from quark.plugins.capabilities import unknown_capability
from quark.plugins.expected import KEY, Expected
from quark.plugins.options import Option, dataset_options, observer_options, options_of, settings_options

__all__ = [
    "STABILITIES",
    "AlgorithmRecord",
    "DatasetRecord",
    "ExporterRecord",
    "FormatRecord",
    "LayerTypeRecord",
    "MetricRecord",
    "ObserverRecord",
    "Record",
    "RunTimeScheme",
    "RunTimeTemplate",
    "SchemeRecord",
    "SelectorRecord",
    "TemplateRecord",
]

STABILITIES = ("stable", "provisional", "experimental")


def _name(_: Any, attribute: Any, value: Any) -> None:
    if not is_valid_name(value):
        raise ValueError(f"{attribute.name} {value!r} is not a name: a name is {NAME_RULE}")


def _names(instance: Any, attribute: Any, values: tuple[object, ...]) -> None:
    for value in values:
        _name(instance, attribute, value)


def _module(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(f"{attribute.name} {value!r} is not a module: write 'package.module'")


def _strings(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise ValueError(f"{values!r} is one string where several belong: write ({values!r},)")
    return tuple(values)


def _capability_set(values: Iterable[str]) -> frozenset[str]:
    return frozenset(_strings(values))


def _capabilities(_: Any, attribute: Any, values: frozenset[str]) -> None:
    if (unknown := unknown_capability(sorted(values, key=str))) is not None:
        raise ValueError(f"{attribute.name}: {unknown}")


def _optional_tuple(values: Iterable[Option] | None) -> tuple[Option, ...] | None:
    return None if values is None else tuple(values)


def _options(record: Any, attribute: Any, values: tuple[Option, ...]) -> None:
    expected = [field.metadata[KEY] for field in attrs.fields(type(record)) if KEY in field.metadata]
    if values and not any(one.options for one in expected):
        raise ValueError(f"a {type(record).__name__} has no options: leave {attribute.name} out")
    names = []
    value: object
    for value in values:
        if not isinstance(value, Option):
            raise ValueError(f"{attribute.name} holds {value!r}: write Option(name, type, default, help)")
        names.append(value.name)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{attribute.name} holds '{twice[0]}' twice: leave one out")


def _exports(values: Mapping[str, str | Reference]) -> Mapping[str, Reference]:
    return MappingProxyType({key: as_reference(ref) for key, ref in dict(values).items()})


def _marks(values: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(values))


def _reasons(_: Any, attribute: Any, values: Mapping[str, str]) -> None:
    for name, reason in values.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"{attribute.name} gives no reason for '{name}': write why, as in {{'{name}': 'it has no scales'}}")


def _value(base: str, **agrees: str) -> Mapping[str, Expected]:
    return {KEY: Expected("value", LazyRef(base), agrees=agrees)}


def _class(base: str, options: Callable[[Any], tuple[Option, ...]] | None = None, **agrees: str) -> Mapping[str, Expected]:
    return {KEY: Expected("class", LazyRef(base), agrees=agrees, options=options)}


def _function(*members: str, options: Callable[[Any], tuple[Option, ...]] | None = None) -> Mapping[str, Expected]:
    return {KEY: Expected("function", members=members, options=options)}


@attrs.frozen(kw_only=True)
class Record:
    """Base of all records.

    Attributes:
        name: Unique among the records of its kind.
        aliases: Other names of the same thing, for old configurations.
        summary: One line for listings.
        stability: One of `STABILITIES`.
        exports: Names of AMD Quark's public API that come with this record.
        replaces: Distribution whose record of the same name this one stands in for, such as ``"quark-schemes"``.
        options: What can be chosen, each a `quark.plugins.Option`. None derives them from the code that the record points at; declared
            ones are listed without importing it, and have to agree with it when it is loaded.
        capabilities: What it can do: names of `quark.plugins.CAPABILITIES`, and a vendor's own as ``"vendor.capability"``.
        api: Versions of the plugin API that the record was written for, as ``(lowest, highest)``; None takes those of its plugin
            (``QUARK_API`` in the plugin module), or any where that states none. A record out of range is refused.

    Raises:
        ValueError: A name, an alias, the stability, a capability, the range or a reference is malformed.
    """

    name: str = attrs.field(validator=_name)
    aliases: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_names)
    summary: str = ""
    stability: str = attrs.field(default="stable", validator=attrs.validators.in_(STABILITIES))
    exports: Mapping[str, Reference] = attrs.field(factory=dict, converter=_exports, hash=False)
    replaces: str | None = None
    options: tuple[Option, ...] | None = attrs.field(default=None, converter=_optional_tuple, validator=attrs.validators.optional(_options))
    capabilities: frozenset[str] = attrs.field(default=frozenset(), converter=_capability_set, validator=_capabilities)
    api: ApiRange | None = attrs.field(
        default=None, converter=as_api_range, validator=attrs.validators.optional(attrs.validators.instance_of(ApiRange))
    )


@attrs.frozen(kw_only=True)
class FormatRecord(Record):
    """A number format: how values become codes and codes become bytes.

    Attributes:
        format: Reference to a `quark.quantizers.NumberFormat` value.
        bits: Bits of one stored element, scales apart.
        layout_version: Of how its codes and scales lie in a checkpoint. Count it up when that changes: a checkpoint says by which it was
            written, and is refused where the plugin that is installed has another.
        error_bound: Largest distance of a value from what it is rounded to, in units of the scale, for values up to the format's
            ``max_magnitude``; the conformance suite checks it. None for formats that round to the nearest of their values, each by itself.
    """

    format: Reference = attrs.field(converter=as_reference, metadata=_value("quark.quantizers:NumberFormat", name="name", bits="bits"))
    bits: float = attrs.field(validator=attrs.validators.gt(0))
    layout_version: int = attrs.field(default=1, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])
    error_bound: float | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.gt(0)))


@attrs.frozen(kw_only=True)
class ObserverRecord(Record):
    """An observer: what of the data it sees decides the range.

    Attributes:
        observer: Reference to a `quark.quantizers.Observer` class.
        class_name: Public name of the class, which JSON configurations hold.
    """

    observer: Reference = attrs.field(
        converter=as_reference, metadata=_class("quark.quantizers:Observer", options=observer_options, class_name="__name__")
    )
    class_name: str


@attrs.frozen(kw_only=True)
class SchemeRecord(Record):
    """A named scheme.

    Attributes:
        config: Reference to a function that builds a fresh `quark.config.layer.QLayerConfig`. It can be called without arguments; keyword
            arguments with defaults are the scheme's options.
        kv_cache: Reference to a function that builds the `QTensorConfig` of a cache in this scheme; None where it cannot hold a cache.
        attention: Likewise for attention probabilities and queries.
        shares_global_scale: Whether fused projections must share one global scale.
        clients: Programs that load a checkpoint in this scheme, for listings; with what they need in brackets.
    """

    config: Reference = attrs.field(converter=as_reference, metadata=_function(options=options_of))
    kv_cache: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=_function())
    attention: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=_function())
    shares_global_scale: bool = False
    clients: tuple[str, ...] = attrs.field(default=(), converter=_strings)


@attrs.frozen(kw_only=True)
class AlgorithmRecord(Record):
    """An algorithm.

    Attributes:
        kind: ``"transform"`` (changes weights, keeps the function) or ``"rounding"`` (chooses codes).
        config: Reference to its `quark.config.algorithm.AlgoConfig` class.
        processor: Reference to the class that does the work; None while a distribution brings the configuration only.
        restorer: Reference to a class with the protocol `quark.checkpoint.restorers.Restorer`, which is made with the settings: it puts
            back what the algorithm leaves in a model beside weights. None where it leaves nothing.
        role: What a transform does to a model, in a word, such as ``"equalization"``. Transforms of one role exclude each other: a run has
            at most one of each. None for one that goes with every other.
        before: Algorithms, or roles of algorithms, that a transform has to precede in a run that has them too.
        after: Algorithms, or roles of algorithms, that a transform has to follow in a run that has them too.
        excluded_schemes: Schemes whose weights a rounding cannot round, each with the reason. A run that would round such weights by it is
            refused with that reason, whatever the options of the scheme.
        worst_ratio: How many times the output error of round-to-nearest that of a rounding may be on other tokens, at least 1; see the
            check ``rounding:is_no_worse_than_round_to_nearest``.

    Raises:
        ValueError: As `Record` does; or a rounding has a role or a place in the order, which only transforms have; or a transform has what
            only roundings have.
    """

    kind: str = attrs.field(validator=attrs.validators.in_(("transform", "rounding")))
    config: Reference = attrs.field(
        converter=as_reference, metadata=_class("quark.config.algorithm:AlgoConfig", options=settings_options, name="name.default")
    )
    processor: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=_function())
    restorer: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=_function("restore", "place_of"))
    role: str | None = attrs.field(default=None, validator=attrs.validators.optional(_name))
    before: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_names)
    after: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_names)
    excluded_schemes: Mapping[str, str] = attrs.field(factory=dict, converter=_marks, hash=False, validator=_reasons)
    worst_ratio: float = attrs.field(default=1.0, validator=attrs.validators.ge(1))

    def __attrs_post_init__(self) -> None:
        if self.kind == "rounding" and (self.role or self.before or self.after):
            raise ValueError(f"role, before and after order transforms, and '{self.name}' is a rounding: leave them out")
        if self.kind == "transform" and (self.excluded_schemes or self.worst_ratio != 1):
            raise ValueError(f"excluded_schemes and worst_ratio are of roundings, and '{self.name}' is a transform: leave them out")
        own = {self.name, *self.aliases, *filter(None, [self.role])}
        if itself := own & {*self.before, *self.after}:
            raise ValueError(f"'{self.name}' cannot go before or after '{min(itself)}', which is itself or its own role: leave that out")
        if both := {*self.before} & {*self.after}:
            raise ValueError(f"'{self.name}' cannot go both before and after '{min(both)}': choose one")


@attrs.frozen(kw_only=True)
class TemplateRecord(Record):
    """A model family; its name is ``config.model_type``.

    Attributes:
        architecture: Reference to a `quark.config.architecture.Architecture`.
        modeling: Module that registers the model class with transformers (``AutoConfig.register``, ``AutoModelForCausalLM.register``),
            such as ``"acme_quant.modeling"``. It is imported when a ``config.json`` of this model type is read. None where transformers
            knows the class.
        example: Reference to a function that returns a tiny float model of a model type, its argument, on which the conformance suite
            checks the facts; see `quark.testing`. None: the suite builds one of a small configuration, where transformers knows the family.
    """

    architecture: Reference | None = attrs.field(converter=as_reference, metadata=_value("quark.config.architecture:Architecture"))
    modeling: str | None = attrs.field(default=None, validator=attrs.validators.optional(_module))
    example: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=_function())


@attrs.frozen(kw_only=True)
class ExporterRecord(Record):
    """A checkpoint layout: the class that writes it, the class that reads it, and the class that makes a float checkpoint of it.

    Which checkpoints reader and dequantizer get is said by ``quant_methods`` and ``marks``, which are compared with
    ``quantization_config`` in the checkpoint's ``config.json``. Of several layouts that fit, the one with the most marks is taken.

    Attributes:
        exporter: Reference to a class with the protocol `quark.checkpoint.Exporter`; None where nothing here writes the layout.
        reader: Reference to a class with the protocol `quark.checkpoint.LayoutReader`; None where nothing here loads what it writes.
        dequantizer: Reference to a class with the protocol `quark.checkpoint.Dequantizer`; None where a checkpoint of this layout cannot
            be quantized anew.
        quant_methods: Values of ``quant_method`` in checkpoints of this layout.
        marks: Further keys of ``quantization_config`` with the values that they have in checkpoints of this layout.
        files: Patterns (``fnmatch``) of file names that the exporter writes beside ``config.json`` and safetensors files. With
            ``overwrite`` an earlier export is replaced only if nothing else lies in its directory.

    Raises:
        ValueError: As `Record` does; or there is a reader or a dequantizer and no quant_methods, or none of the three classes.
    """

    exporter: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=_function("export", options=options_of)
    )
    reader: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=_function("configuration", "prepare", "place_of")
    )
    dequantizer: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=_function("float_tensors"))
    quant_methods: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    marks: Mapping[str, str] = attrs.field(factory=dict, converter=_marks, hash=False)
    files: tuple[str, ...] = attrs.field(default=(), converter=_strings)

    def __attrs_post_init__(self) -> None:
        if self.exporter is None and self.reader is None and self.dequantizer is None:
            raise ValueError(f"the layout '{self.name}' has neither exporter nor reader nor dequantizer: name one of them")
        if (self.reader is not None or self.dequantizer is not None) and not self.quant_methods:
            raise ValueError("a layout with a reader or a dequantizer says in quant_methods which checkpoints it reads")

    def fits(self, block: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with that ``quantization_config`` is of this layout."""
        return block.get("quant_method") in self.quant_methods and all(block.get(key) == value for key, value in self.marks.items())


@attrs.frozen(kw_only=True)
class LayerTypeRecord(Record):
    """A class of float layers, and the class that they become when they are quantized.

    The class is matched exactly, since a subclass may compute something else. Its module is never imported for that: a layer of the class
    can only be there if somebody has imported it.

    Attributes:
        layer: Reference to the float class, a ``torch.nn.Module`` with a parameter ``weight``, and perhaps ``bias``.
        quantized: Reference to a subclass of `quark.modules.QuantizedLayer`; None for layers that stay float though they are subclasses of
            ``torch.nn.Linear`` that compute the same.
        planned_as: Name of the layer type by which configurations, plans and algorithms know such layers; None is their own. A layer that
            is planned as ``"linear"`` is rounded by whatever rounds linear layers.
        transposed: Whether the float class keeps its weight ``[in, out]``; channels, groups and scales are those of ``[out, in]``.
        lookup: Whether its input is indices. Such layers are quantized only where a pattern or a type names them, and only their weight.
    """

    layer: Reference = attrs.field(converter=as_reference, metadata=_class("torch.nn:Module"))
    quantized: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=_class("quark.modules.layers:QuantizedLayer")
    )
    planned_as: str | None = attrs.field(default=None, validator=attrs.validators.optional(_name))
    transposed: bool = False
    lookup: bool = False


@attrs.frozen(kw_only=True)
class SelectorRecord(Record):
    """A selector: it chooses a scheme for each group of layers, under a budget.

    Attributes:
        selector: Reference to a class with the protocol `quark.selection.SchemeSelector`. It can be called without arguments; keyword
            arguments with defaults are the selector's options.
    """

    selector: Reference = attrs.field(converter=as_reference, metadata=_function("select", options=options_of))


@attrs.frozen(kw_only=True)
class DatasetRecord(Record):
    """A source of text for calibration and evaluation: data with a name of their own, or files of a kind.

    Attributes:
        samples: Reference to a function that yields the samples, in the same order each time: each is a text, or a chat, which is a list of
            messages with the keys ``role`` and ``content``. Its keyword arguments are the source's options. A source that reads files has
            the argument ``path`` too, the path of a file.
        suffixes: Endings of the files that it reads, such as ``".jsonl"``; empty for data with a name of their own.
        example: Of a source that reads files, reference to a function that writes a small file of the kind to the path it is given, for
            the conformance suite.
        is_online: Whether the data are downloaded; the conformance suite then does not read them.

    Raises:
        ValueError: As `Record` does; or an ending does not begin with a dot.
    """

    samples: Reference = attrs.field(converter=as_reference, metadata=_function(options=dataset_options))
    suffixes: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    example: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=_function())
    is_online: bool = False

    def __attrs_post_init__(self) -> None:
        for suffix in self.suffixes:
            if not re.fullmatch(r"\.[a-z0-9]+", suffix):
                raise ValueError(f"the ending {suffix!r} is none: write a dot and what follows it, in small letters, such as '.jsonl'")


@attrs.frozen(kw_only=True)
class MetricRecord(Record):
    """A metric: one number for each predicted token, of which an evaluation gives the mean with its standard error.

    Attributes:
        metric: Reference to a function ``(log_q, targets, log_p)`` that returns a value for each token, ``[N]``: of the model's
            log-probabilities ``[N, vocabulary]``, the right tokens ``[N]``, and the reference's log-probabilities, or None.
        needs_reference: Whether it compares with a reference model; otherwise ``log_p`` is None.
    """

    metric: Reference = attrs.field(converter=as_reference, metadata=_function())
    needs_reference: bool = False


def _run_time_name(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not value.strip() or ":" in value:
        raise ValueError(f"{attribute.name} {value!r} is not a name: write a text without ':', which parts a distribution from a name")


@attrs.frozen(kw_only=True)
class RunTimeScheme(SchemeRecord):
    """A scheme that a program registers for itself. The program's own names may have any form.

    Attributes:
        scheme: The `quark.templates.QuantizationScheme` that was registered.
    """

    name: str = attrs.field(validator=_run_time_name)
    scheme: Any = None


@attrs.frozen(kw_only=True)
class RunTimeTemplate(TemplateRecord):
    """A template that a program registers for itself; its name is any ``config.model_type``.

    Attributes:
        architecture: Facts about the family; None where nothing states them, and modules are looked at instead.
        template: The `quark.templates.LLMTemplate` that was registered.
    """

    name: str = attrs.field(validator=_run_time_name)
    architecture: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=_value("quark.config.architecture:Architecture")
    )
    template: Any = None
