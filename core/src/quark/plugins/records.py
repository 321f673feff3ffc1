"""Records that plugins register. Here are the base class, and the records of formats, observers, schemes and
algorithms.

A record is frozen. It points at code by name, so a new record imports nothing. The other records are in
`quark.plugins.model_records` and `quark.plugins.program_records`.

Every record has a name (see `quark.base.names`), a one-line summary and a stability. It can also have
aliases and ``exports``. ``exports`` maps names of AMD Quark's public API to references to objects of the
plugin. A plain name (``"Int4PerGroupSpec"``) can be imported from every public module that offers names of
plugins. If the key is a module and a name (``"quark.torch.algorithm.awq.awq:AwqProcessor"``), quark creates a
module with that name, and the object can be imported from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from quark.base.lazy import Reference, as_optional_reference, as_reference
from quark.plugins.options import Option, observer_options, options_of, settings_options
from quark.plugins.record_fields import (
    as_capabilities,
    as_exports,
    as_marks,
    as_optional_tuple,
    as_strings,
    check_capabilities,
    check_name,
    check_names,
    check_options,
    check_reasons,
    check_run_time_name,
    class_reference,
    function_reference,
    value_reference,
)

STABILITIES = ("stable", "provisional", "experimental")


@attrs.frozen(kw_only=True)
class Record:
    """Base class of all records.

    Attributes:
        name: Name of the record. It must be unique among the records of its kind.
        aliases: Other names by which the record can be found, such as names in old configurations.
        summary: One line that listings show.
        stability: One of `STABILITIES`.
        exports: Mapping from names of AMD Quark's public API to references. Users can import the objects
            under these names.
        replaces: Name of a distribution, such as ``"quark-schemes"``. This record replaces the record of the
            same name in that distribution. None if it replaces no record.
        options: The options of the record, each a `quark.plugins.Option`. If this field is None, quark reads
            the options from the code that the record points at. quark can list declared options without an
            import of this code. Declared options must agree with the code.
        capabilities: Keys of `quark.plugins.CAPABILITIES`. A vendor may add capabilities as
            ``"vendor.capability"``.

    Raises:
        ValueError: A name, an alias, the stability, a capability or a reference is malformed.
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


@attrs.frozen(kw_only=True)
class FormatRecord(Record):
    """A number format, which defines the codes of values and the bytes of codes.

    Attributes:
        format: Reference to an instance of `quark.numbers.NumberFormat`.
        bits: Number of bits of one stored element, without scales.
        layout_version: Version of the layout of codes and scales in a checkpoint. Increase the version if
            the layout changes. A checkpoint states the version of its layout, and quark refuses the
            checkpoint if the installed plugin has another version.
        error_bound: Largest distance between a value and the rounded value, in units of the scale. The bound
            applies to values up to the format's ``max_magnitude``, and the conformance suite checks it. None
            if the format rounds each element to the nearest representable value.
    """

    format: Reference = attrs.field(
        converter=as_reference, metadata=value_reference("quark.numbers:NumberFormat", name="name", bits="bits")
    )
    bits: float = attrs.field(validator=attrs.validators.gt(0))
    layout_version: int = attrs.field(default=1, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])
    error_bound: float | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.gt(0)))


@attrs.frozen(kw_only=True)
class ObserverRecord(Record):
    """An observer, which finds the range of a tensor's values.

    Attributes:
        observer: Reference to a subclass of `quark.numbers.Observer`.
        class_name: Name of that class. JSON configurations refer to the observer by this name.
    """

    observer: Reference = attrs.field(
        converter=as_reference, metadata=class_reference("quark.numbers:Observer", options=observer_options, class_name="__name__")
    )
    class_name: str


@attrs.frozen(kw_only=True)
class SchemeRecord(Record):
    """A scheme, which is a layer configuration that has a name.

    Attributes:
        config: Reference to a function that returns a new `quark.config.layer.QLayerConfig`. The keyword
            arguments of the function are the options of the scheme. All options have defaults.
        kv_cache: Reference to a function that returns the configuration of a KV cache in this scheme, for
            keys and values of shape ``[batch, heads, tokens, elements]``. The configuration is a
            `QTensorConfig`, or a list of them for scales of several levels. None if a cache cannot use the
            scheme.
        attention: Reference to a function that returns the `QTensorConfig` of attention probabilities and
            queries. None if attention cannot use the scheme.
        shares_global_scale: Whether fused projections must share one global scale.
        clients: Names of programs that load a checkpoint in this scheme, for listings. A name may end with
            requirements in brackets.
    """

    config: Reference = attrs.field(converter=as_reference, metadata=function_reference(options=options_of))
    kv_cache: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
    attention: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
    shares_global_scale: bool = False
    clients: tuple[str, ...] = attrs.field(default=(), converter=as_strings)


@attrs.frozen(kw_only=True)
class RunTimeScheme(SchemeRecord):
    """A scheme that a program registers while the program runs. The name of the scheme may contain any
    character except ":".

    Attributes:
        scheme: The `quark.config.templates.QuantizationScheme` that the program registered.
    """

    name: str = attrs.field(validator=check_run_time_name)
    scheme: Any = None


@attrs.frozen(kw_only=True)
class AlgorithmRecord(Record):
    """An algorithm.

    Attributes:
        kind: ``"transform"``, ``"rounding"``, ``"block_tuning"`` or ``"branch"``. A transform changes weights
            without changing the output of the float model. A rounding chooses the codes of weights. A block
            tuning changes codes that a rounding chose, to reduce the output error of the whole block. A
            branch adds a small float computation in parallel to layers.
        config: Reference to the class of the settings, a subclass of `quark.config.algorithm.AlgoConfig`.
        processor: Reference to the class that implements the algorithm. None if the distribution provides
            only the settings.
        restorer: Reference to a class with the protocol `quark.checkpoint.restorers.Restorer`, which is
            created with the settings. When a checkpoint is loaded, it restores the modules that the algorithm
            added to the model. None if the algorithm adds no modules. A branch needs no restorer.
        role: One word for the effect of a transform or a tuning, such as ``"equalization"``. A run has at
            most one algorithm of each role. None if the algorithm can be combined with all other algorithms.
        before: Names or roles of algorithms of the same kind. If a run has them, this transform or tuning
            runs before them.
        after: Names or roles of algorithms of the same kind. If a run has them, this transform or tuning
            runs after them.
        excluded_schemes: Mapping from the name of a scheme to a reason. This rounding cannot round weights of
            such a scheme. quark refuses a run that would round them and shows the reason, whatever options
            the scheme has.
        worst_ratio: The largest ratio that is allowed between the output errors of this rounding and of
            round-to-nearest, on tokens that are not calibration tokens. It is at least 1. The check
            ``rounding:is_no_worse_than_round_to_nearest`` of the conformance suite uses this number.

    Raises:
        ValueError: A field is malformed (see `Record`). Or a rounding or a branch has ``role``, ``before`` or
            ``after``, which only transforms and tunings have. Or an algorithm that is not a rounding has
            ``excluded_schemes`` or ``worst_ratio``.
    """

    kind: str = attrs.field(validator=attrs.validators.in_(("transform", "rounding", "block_tuning", "branch")))
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
        if self.kind in ("rounding", "branch") and (self.role or self.before or self.after):
            raise ValueError(f"only transforms and tunings have role, before and after, but '{self.name}' is a {self.kind}: leave them out")
        if self.kind != "rounding" and (self.excluded_schemes or self.worst_ratio != 1):
            raise ValueError(f"only roundings have excluded_schemes and worst_ratio, but '{self.name}' is a {self.kind}: leave them out")
        own = {self.name, *self.aliases, *filter(None, [self.role])}
        if itself := own & {*self.before, *self.after}:
            raise ValueError(
                f"'{self.name}' cannot run before or after '{min(itself)}', because that is its own name or role. Leave it out"
            )
        if both := {*self.before} & {*self.after}:
            raise ValueError(f"'{self.name}' cannot run both before and after '{min(both)}': name it in only one of before and after")
