"""Records, which plugins register: the base; number formats, observers, schemes and algorithms.

A record is frozen and points at code by name; making one imports nothing. Other records are in
`quark.plugins.model_records` and `quark.plugins.program_records`.

Every record has a name (see `quark.base.names`), perhaps aliases, a one-line summary, a stability, and
``exports``: the names of AMD Quark's public API that come with it, each a reference. An export is keyed by a
plain name (``"Int4PerGroupSpec"``: every public module that has plugins' names has it) or by module and name
(``"quark.torch.algorithm.awq.awq:AwqProcessor"``: that module then exists).
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
        replaces: Distribution whose record of the same name this one stands in for, such as
            ``"quark-schemes"``.
        options: Its options, each a `quark.plugins.Option`. None derives them from the code that the
            record points at; declared ones are listed without importing it, and have to agree with it when it
            is loaded.
        capabilities: What it can do: names of `quark.plugins.CAPABILITIES`, and a vendor's own as
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
    """A number format: how values become codes and codes become bytes.

    Attributes:
        format: Reference to a `quark.numbers.NumberFormat` value.
        bits: Bits of one stored element, scales apart.
        layout_version: Version of the layout of its codes and scales in a checkpoint. Count it up when that
            changes: a checkpoint says by which it was written, and is refused where the plugin that is
            installed has another.
        error_bound: Largest distance of a value from its rounded value, in units of the scale, for values
            up to the format's ``max_magnitude``; the conformance suite checks it. None for formats that round
            to the nearest of their values, each by itself.
    """

    format: Reference = attrs.field(
        converter=as_reference, metadata=value_reference("quark.numbers:NumberFormat", name="name", bits="bits")
    )
    bits: float = attrs.field(validator=attrs.validators.gt(0))
    layout_version: int = attrs.field(default=1, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])
    error_bound: float | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.gt(0)))


@attrs.frozen(kw_only=True)
class ObserverRecord(Record):
    """An observer, which finds the range of the data that it sees.

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
        config: Reference to a function that builds a fresh `quark.config.layer.QLayerConfig`. It can be
            called without arguments; keyword arguments with defaults are the scheme's options.
        kv_cache: Reference to a function that builds the `QTensorConfig` of a cache in this scheme; None
            where it cannot hold a cache.
        attention: Likewise for attention probabilities and queries.
        shares_global_scale: Whether fused projections must share one global scale.
        clients: Programs that load a checkpoint in this scheme, for listings; with what they need in
            brackets.
    """

    config: Reference = attrs.field(converter=as_reference, metadata=function_reference(options=options_of))
    kv_cache: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
    attention: Reference | None = attrs.field(default=None, converter=as_optional_reference, metadata=function_reference())
    shares_global_scale: bool = False
    clients: tuple[str, ...] = attrs.field(default=(), converter=as_strings)


@attrs.frozen(kw_only=True)
class RunTimeScheme(SchemeRecord):
    """A scheme that a program registers for itself. The program's own names may have any form.

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
        processor: Reference to the class that does the work; None while a distribution brings the
            configuration only.
        restorer: Reference to a class with the protocol `quark.checkpoint.restorers.Restorer`, which is made
            with the settings: it puts back the parts that the algorithm leaves in a model beside weights.
            None where it leaves nothing, and for branches, which are put back without one.
        role: Effect of a transform or a tuning on a model, in a word, such as ``"equalization"``. Algorithms
            of one role exclude each other: a run has at most one of each. None for one that goes with every
            other.
        before: Algorithms of the same kind, or roles of such, that a transform or a tuning has to precede in
            a run that has them too.
        after: Algorithms of the same kind, or roles of such, that it has to follow in a run that has them
            too.
        excluded_schemes: Schemes whose weights a rounding cannot round, each with the reason. A run that
            would round such weights by it is refused with that reason, whatever the options of the scheme.
        worst_ratio: How many times the output error of round-to-nearest that of a rounding may be on other
            tokens, at least 1; see the check ``rounding:is_no_worse_than_round_to_nearest``.

    Raises:
        ValueError: As `Record` does; or a rounding or a branch has a role or a place in the order, of which a
            run has one; or another kind has a field of roundings.
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
