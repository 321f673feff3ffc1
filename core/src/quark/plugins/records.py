"""Records, which plugins register: the base; number formats, observers, schemes and algorithms.

A record is frozen and points at code by name; creating one imports nothing. Other records are in
`quark.plugins.model_records` and `quark.plugins.program_records`.

Every record has a name (see `quark.base.names`), perhaps aliases, a one-line summary, a stability, and
``exports``: the names of AMD Quark's public API that come with it, each with a reference. A plain name
(``"Int4PerGroupSpec"``) appears in every public module that has names of plugins. A module and a name
(``"quark.torch.algorithm.awq.awq:AwqProcessor"``) create that module.
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
    """Base of all records.

    Attributes:
        name: Unique among the records of its kind.
        aliases: Other names of the same thing, for old configurations.
        summary: One line for listings.
        stability: One of `STABILITIES`.
        exports: Names of AMD Quark's public API that come with this record.
        replaces: Distribution whose record of the same name this record replaces, such as
            ``"quark-schemes"``.
        options: Its options, each a `quark.plugins.Option`. If None, they are read from the code that the
            record points at. Declared options are listed without importing that code, and must agree with it.
        capabilities: Names of `quark.plugins.CAPABILITIES`, or a vendor's own as ``"vendor.capability"``.

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
    """A number format: how values become codes and codes become bytes.

    Attributes:
        format: Reference to a `quark.numbers.NumberFormat` value.
        bits: Bits of one stored element, without scales.
        layout_version: Version of the layout of codes and scales in a checkpoint. Increase it if the layout
            changes: a checkpoint holds its version, and a plugin with another version refuses it.
        error_bound: Largest distance between a value and its rounded value, in units of the scale, for values
            up to the format's ``max_magnitude``; the conformance suite checks it. None for formats that round
            each element to the nearest of their values.
    """

    format: Reference = attrs.field(
        converter=as_reference, metadata=value_reference("quark.numbers:NumberFormat", name="name", bits="bits")
    )
    bits: float = attrs.field(validator=attrs.validators.gt(0))
    layout_version: int = attrs.field(default=1, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])
    error_bound: float | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.gt(0)))


@attrs.frozen(kw_only=True)
class ObserverRecord(Record):
    """An observer, which finds the range of the data that it observes.

    Attributes:
        observer: Reference to a `quark.numbers.Observer` class.
        class_name: Public name of the class, used in JSON configurations.
    """

    observer: Reference = attrs.field(
        converter=as_reference, metadata=class_reference("quark.numbers:Observer", options=observer_options, class_name="__name__")
    )
    class_name: str


@attrs.frozen(kw_only=True)
class SchemeRecord(Record):
    """A named scheme.

    Attributes:
        config: Reference to a function that builds a fresh `quark.config.layer.QLayerConfig`. Its keyword
            arguments are the scheme's options; all have defaults.
        kv_cache: Reference to a function that builds the `QTensorConfig` of a cache in this scheme, or a list
            of levels, for keys and values ``[batch, heads, tokens, elements]``; None if it cannot be used for
            a cache.
        attention: Reference to a function that builds the `QTensorConfig` of attention probabilities and
            queries; None if it cannot be used for them.
        shares_global_scale: Whether fused projections must share one global scale.
        clients: Programs that load a checkpoint in this scheme, for listings; their requirements are in
            brackets.
    """

    config: Reference = attrs.field(converter=as_reference, metadata=function_reference(options=options_of))
    kv_cache: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
    attention: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
    shares_global_scale: bool = False
    clients: tuple[str, ...] = attrs.field(default=(), converter=as_strings)


@attrs.frozen(kw_only=True)
class RunTimeScheme(SchemeRecord):
    """A scheme that a program registers for itself. Such names may have any form.

    Attributes:
        scheme: The `quark.config.templates.QuantizationScheme` that was registered.
    """

    name: str = attrs.field(validator=check_run_time_name)
    scheme: Any = None


@attrs.frozen(kw_only=True)
class AlgorithmRecord(Record):
    """An algorithm.

    Attributes:
        kind: ``"transform"`` (changes weights, keeps the function), ``"rounding"`` (chooses codes),
            ``"block_tuning"`` (changes the codes of a rounding, by the output of the whole block) or
            ``"branch"`` (adds a small float computation beside layers).
        config: Reference to its `quark.config.algorithm.AlgoConfig` class.
        processor: Reference to the class that does the work; None if a distribution has only the
            configuration.
        restorer: Reference to a class with the protocol `quark.checkpoint.restorers.Restorer`, which is
            created with the settings. It restores the parts that the algorithm leaves in a model beside
            weights. None if there are none; branches are restored without one.
        role: Effect of a transform or a tuning, in a word, such as ``"equalization"``. A run has at most one
            algorithm of each role. None for an algorithm that can be combined with all others.
        before: Algorithms or roles of the same kind that this transform or tuning must precede, if a run has
            them.
        after: Algorithms or roles of the same kind that it must follow, if a run has them.
        excluded_schemes: Schemes whose weights a rounding cannot round, each with the reason. A run that
            would round such weights is refused with that reason, whatever the scheme's options.
        worst_ratio: Largest output error of a rounding on other tokens, in units of the error of
            round-to-nearest; at least 1. See the check ``rounding:is_no_worse_than_round_to_nearest``.

    Raises:
        ValueError: As `Record` does. Or a rounding or a branch has a role or a place in the order, although
            a run has only one of each. Or another kind than a rounding has ``excluded_schemes`` or
            ``worst_ratio``.
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
            raise ValueError(f"role, before and after order transforms and tunings, and '{self.name}' is a {self.kind}: leave them out")
        if self.kind != "rounding" and (self.excluded_schemes or self.worst_ratio != 1):
            raise ValueError(f"excluded_schemes and worst_ratio are of roundings, and '{self.name}' is a {self.kind}: leave them out")
        own = {self.name, *self.aliases, *filter(None, [self.role])}
        if itself := own & {*self.before, *self.after}:
            raise ValueError(f"'{self.name}' cannot go before or after '{min(itself)}', which is itself or its own role: leave that out")
        if both := {*self.before} & {*self.after}:
            raise ValueError(f"'{self.name}' cannot go both before and after '{min(both)}': choose one")
