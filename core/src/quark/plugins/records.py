"""What a plugin registers: frozen records that point at code by name. Making one imports nothing.

Every record has a name (see `quark.base.names`), perhaps aliases, a one-line summary, a stability, and ``exports``: the names of AMD
Quark's public API that come with it, each a reference. An export is keyed by a plain name (``"Int4PerGroupSpec"``: every public module
that has plugins' names has it) or by module and name (``"quark.torch.algorithm.awq.awq:AwqProcessor"``: that module then exists).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from quark.base.lazy import Reference, as_optional_reference, as_reference
from quark.plugins.api_version import ApiRange, as_api_range
from quark.plugins.options import Option, dataset_options, observer_options, options_of, settings_options
from quark.plugins.record_fields import (
    as_capabilities,
    as_exports,
    as_marks,
    as_optional_tuple,
    as_strings,
    check_capabilities,
    check_module,
    check_name,
    check_names,
    check_options,
    check_reasons,
    class_reference,
    function_reference,
    value_reference,
)

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

    name: str = attrs.field(validator=check_name)
    aliases: tuple[str, ...] = attrs.field(default=(), converter=as_strings, validator=check_names)
    summary: str = ""
    stability: str = attrs.field(default="stable", validator=attrs.validators.in_(STABILITIES))
    exports: Mapping[str, Reference] = attrs.field(factory=dict, converter=as_exports, hash=False)
    replaces: str | None = None
    options: tuple[Option, ...] | None = attrs.field(
        default=None, converter=as_optional_tuple, validator=attrs.validators.optional(check_options)
    )
    capabilities: frozenset[str] = attrs.field(default=frozenset(), converter=as_capabilities, validator=check_capabilities)
    api: ApiRange | None = attrs.field(
        default=None, converter=as_api_range, validator=attrs.validators.optional(attrs.validators.instance_of(ApiRange))
    )


@attrs.frozen(kw_only=True)
class FormatRecord(Record):
    """A number format: how values become codes and codes become bytes.

    Attributes:
        format: Reference to a `quark.numbers.NumberFormat` value.
        bits: Bits of one stored element, scales apart.
        layout_version: Of how its codes and scales lie in a checkpoint. Count it up when that changes: a checkpoint says by which it was
            written, and is refused where the plugin that is installed has another.
        error_bound: Largest distance of a value from what it is rounded to, in units of the scale, for values up to the format's
            ``max_magnitude``; the conformance suite checks it. None for formats that round to the nearest of their values, each by itself.
    """

    format: Reference = attrs.field(
        converter=as_reference, metadata=value_reference("quark.numbers:NumberFormat", name="name", bits="bits")
    )
    bits: float = attrs.field(validator=attrs.validators.gt(0))
    layout_version: int = attrs.field(default=1, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])
    error_bound: float | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.gt(0)))


@attrs.frozen(kw_only=True)
class ObserverRecord(Record):
    """An observer: what of the data it sees decides the range.

    Attributes:
        observer: Reference to a `quark.numbers.Observer` class.
        class_name: Public name of the class, which JSON configurations hold.
    """

    observer: Reference = attrs.field(
        converter=as_reference, metadata=class_reference("quark.numbers:Observer", options=observer_options, class_name="__name__")
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

    config: Reference = attrs.field(converter=as_reference, metadata=function_reference(options=options_of))
    kv_cache: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
    attention: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
    shares_global_scale: bool = False
    clients: tuple[str, ...] = attrs.field(default=(), converter=as_strings)


@attrs.frozen(kw_only=True)
class AlgorithmRecord(Record):
    """An algorithm.

    Attributes:
        kind: ``"transform"`` (changes weights, keeps the function), ``"rounding"`` (chooses codes) or ``"block_tuning"`` (changes what a
            rounding has chosen, by the output of the whole block).
        config: Reference to its `quark.config.algorithm.AlgoConfig` class.
        processor: Reference to the class that does the work; None while a distribution brings the configuration only.
        restorer: Reference to a class with the protocol `quark.checkpoint.restorers.Restorer`, which is made with the settings: it puts
            back what the algorithm leaves in a model beside weights. None where it leaves nothing.
        role: What a transform or a tuning does to a model, in a word, such as ``"equalization"``. Algorithms of one role exclude each
            other: a run has at most one of each. None for one that goes with every other.
        before: Algorithms of the same kind, or roles of such, that a transform or a tuning has to precede in a run that has them too.
        after: Algorithms of the same kind, or roles of such, that it has to follow in a run that has them too.
        excluded_schemes: Schemes whose weights a rounding cannot round, each with the reason. A run that would round such weights by it is
            refused with that reason, whatever the options of the scheme.
        worst_ratio: How many times the output error of round-to-nearest that of a rounding may be on other tokens, at least 1; see the
            check ``rounding:is_no_worse_than_round_to_nearest``.

    Raises:
        ValueError: As `Record` does; or a rounding has a role or a place in the order, of which a run has one; or another kind has what
            only roundings have.
    """

    kind: str = attrs.field(validator=attrs.validators.in_(("transform", "rounding", "block_tuning")))
    config: Reference = attrs.field(
        converter=as_reference, metadata=class_reference("quark.config.algorithm:AlgoConfig", options=settings_options, name="name.default")
    )
    processor: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
    restorer: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=function_reference("restore", "place_of")
    )
    role: str | None = attrs.field(default=None, validator=attrs.validators.optional(check_name))
    before: tuple[str, ...] = attrs.field(default=(), converter=as_strings, validator=check_names)
    after: tuple[str, ...] = attrs.field(default=(), converter=as_strings, validator=check_names)
    excluded_schemes: Mapping[str, str] = attrs.field(factory=dict, converter=as_marks, hash=False, validator=check_reasons)
    worst_ratio: float = attrs.field(default=1.0, validator=attrs.validators.ge(1))

    def __attrs_post_init__(self) -> None:
        if self.kind == "rounding" and (self.role or self.before or self.after):
            raise ValueError(f"role, before and after order transforms and tunings, and '{self.name}' is a rounding: leave them out")
        if self.kind != "rounding" and (self.excluded_schemes or self.worst_ratio != 1):
            raise ValueError(f"excluded_schemes and worst_ratio are of roundings, and '{self.name}' is a {self.kind}: leave them out")
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
            checks the facts; see `quark_devkit`. None: the suite builds one of a small configuration, where transformers knows the family.
    """

    architecture: Reference | None = attrs.field(converter=as_reference, metadata=value_reference("quark.config.architecture:Architecture"))
    modeling: str | None = attrs.field(default=None, validator=attrs.validators.optional(check_module))
    example: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())


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
        inspector: Reference to a class with the protocol `quark.checkpoint.inspection.Inspector`, which says what runtimes make of a
            checkpoint of this layout; None where nobody has written down their rules. It needs a reader.
        quant_methods: Values of ``quant_method`` in checkpoints of this layout.
        marks: Further keys of ``quantization_config`` with the values that they have in checkpoints of this layout.
        files: Patterns (``fnmatch``) of file names that the exporter writes beside ``config.json`` and safetensors files; without
            ``quant_methods``, it writes these files alone, and such an export may lie in one directory with another. With ``overwrite`` an
            earlier export is replaced only if nothing else lies in its directory.

    Raises:
        ValueError: As `Record` does; or there is a reader or a dequantizer and no quant_methods, an inspector and no reader, or no class
            that writes or reads.
    """

    exporter: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=function_reference("export", options=options_of)
    )
    reader: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=function_reference("configuration", "prepare", "place_of")
    )
    dequantizer: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference("float_tensors"))
    inspector: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference("support"))
    quant_methods: tuple[str, ...] = attrs.field(default=(), converter=as_strings)
    marks: Mapping[str, str] = attrs.field(factory=dict, converter=as_marks, hash=False)
    files: tuple[str, ...] = attrs.field(default=(), converter=as_strings)

    def __attrs_post_init__(self) -> None:
        if self.exporter is None and self.reader is None and self.dequantizer is None:
            raise ValueError(f"the layout '{self.name}' has neither exporter nor reader nor dequantizer: name one of them")
        if self.inspector is not None and self.reader is None:
            raise ValueError(f"the layout '{self.name}' has an inspector, which gets what a reader makes: name a reader too")
        if (self.reader is not None or self.dequantizer is not None) and not self.quant_methods:
            raise ValueError("a layout with a reader or a dequantizer says in quant_methods which checkpoints it reads")

    def fits(self, block: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with that ``quantization_config`` is of this layout."""
        return block.get("quant_method") in self.quant_methods and all(block.get(key) == value for key, value in self.marks.items())


@attrs.frozen(kw_only=True)
class LayerTypeRecord(Record):
    """A class of float layers, and the class that they become when they are quantized.

    The class is matched exactly, or by a subclass that overrides nothing, since any other may compute something else. Its module is never
    imported for that: a layer of the class can only be there if somebody has imported it.

    Attributes:
        layer: Reference to the float class, a ``torch.nn.Module`` with a parameter ``weight``, and perhaps ``bias``.
        quantized: Reference to a subclass of `quark.models.layers.QuantizedLayer`; None for layers that stay float though they are
            subclasses of ``torch.nn.Linear`` that compute the same.
        planned_as: Name of the layer type by which configurations, plans and algorithms know such layers; None is their own. A layer that
            is planned as ``"linear"`` is rounded by whatever rounds linear layers.
        transposed: Whether the float class keeps its weight ``[in, out / groups, …]``, input channels first, where ``groups`` is an
            attribute of the layer or 1; channels, groups and scales are those of ``[out, in / groups, …]``.
        lookup: Whether its input is indices, which are not quantized; ``by_name`` is then implied.
        by_name: Whether such layers are quantized only where a pattern or a type names them, and not by a global configuration.
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


@attrs.frozen(kw_only=True)
class SelectorRecord(Record):
    """A selector: it chooses a scheme for each group of layers, under a budget.

    Attributes:
        selector: Reference to a class with the protocol `quark_workbench.mixed_precision.SchemeSelector`. It can be called without
            arguments; keyword arguments with defaults are the selector's options.
    """

    selector: Reference = attrs.field(converter=as_reference, metadata=function_reference("select", options=options_of))


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

    samples: Reference = attrs.field(converter=as_reference, metadata=function_reference(options=dataset_options))
    suffixes: tuple[str, ...] = attrs.field(default=(), converter=as_strings)
    example: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
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

    metric: Reference = attrs.field(converter=as_reference, metadata=function_reference())
    needs_reference: bool = False


def _run_time_name(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not value.strip() or ":" in value:
        raise ValueError(f"{attribute.name} {value!r} is not a name: write a text without ':', which parts a distribution from a name")


@attrs.frozen(kw_only=True)
class RunTimeScheme(SchemeRecord):
    """A scheme that a program registers for itself. The program's own names may have any form.

    Attributes:
        scheme: The `quark.config.templates.QuantizationScheme` that was registered.
    """

    name: str = attrs.field(validator=_run_time_name)
    scheme: Any = None


@attrs.frozen(kw_only=True)
class RunTimeTemplate(TemplateRecord):
    """A template that a program registers for itself; its name is any ``config.model_type``.

    Attributes:
        architecture: Facts about the family; None where nothing states them, and modules are looked at instead.
        template: The `quark.config.templates.LLMTemplate` that was registered.
    """

    name: str = attrs.field(validator=_run_time_name)
    architecture: Reference | None = attrs.field(
        default=None, converter=as_optional_reference, metadata=value_reference("quark.config.architecture:Architecture")
    )
    template: Any = None
