"""Algorithms: the algorithms of one run, created from the settings in a QConfig.

A run has one rounding. It may also have transforms, tunings and a branching.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from quark.algorithms import Rounding, RoundToNearest, Statistic, Transform, Tuning
from quark.algorithms.branching import CheckedBranching, branching_of
from quark.calibration.plugin_checks import CheckedRounding, CheckedTuning, StartedTransform, refuse_strange
from quark.config.algorithm import AlgoConfig, StoredAlgoConfig
from quark.config.layer import levels
from quark.config.model import QConfig
from quark.config.templates.algorithms import algo_config_from_dict, require_processor
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnsupportedError
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan
from quark.numbers import quantizer_for
from quark.plugins import AlgorithmRecord, algorithms, schemes
from quark.plugins.attribution import attributed, origin

Kind = tuple[tuple[object, ...], ...]


@attrs.frozen(eq=False)
class Algorithms:
    """The algorithms that change weights in one run.

    Attributes:
        transforms: Transforms by registered name, in the order in which they are applied.
        rounding: The rounding, which chooses the codes of weights.
        rounding_name: Registered name of the rounding. None for round-to-nearest.
        tunings: Tunings by registered name, in the order in which they are applied.
        branching: Adds branches to layers. None if layers get no branches.
    """

    transforms: Mapping[str, Transform] = attrs.field(factory=dict)
    rounding: Rounding = attrs.field(factory=RoundToNearest)
    rounding_name: str | None = None
    tunings: Mapping[str, Tuning] = attrs.field(factory=dict)
    branching: CheckedBranching | None = None

    @property
    def needs(self) -> tuple[type[Statistic], ...]:
        """The classes of the statistics that the rounding and the branching need. They are statistics of
        inputs.
        """
        return tuple(dict.fromkeys((*self.rounding.needs, *(self.branching.branching.needs if self.branching is not None else ()))))

    @property
    def is_sequential(self) -> bool:
        """Whether a block is rounded while calibration forward passes are in it. They then continue with
        rounded weights.
        """
        return bool(self.needs or self.tunings)

    @property
    def compensates(self) -> bool:
        """Whether the rounding uses statistics of layers' inputs to compensate rounding errors."""
        return bool(self.rounding.needs)

    @property
    def rounding_wants_float(self) -> bool:
        """Whether the rounding or the branching compares inputs of layers with those of the float model."""
        return any(kind.wants_float for kind in self.needs)

    @property
    def streams(self) -> int:
        """The number of forward passes per calibration sample. It is 2 if an algorithm needs a second forward
        pass for the float model, and otherwise 1.
        """
        return 1 + (self.rounding_wants_float or any(t.wants_float for t in self.tunings.values()))

    @property
    def works_by_block(self) -> bool:
        """Whether all algorithms can run with one block in memory at a time."""
        return all(t.works_by_block for t in self.transforms.values())

    @property
    def in_need_of_data(self) -> list[str]:
        """Names of the algorithms that need calibration data."""
        names = [name for name, transform in self.transforms.items() if transform.needs]
        if self.compensates and self.rounding_name not in names:
            names.append(self.rounding_name or type(self.rounding).__name__)
        if self.branching is not None and self.branching.branching.needs:
            names.append(self.branching.name)
        return [*names, *self.tunings]

    def with_settings(self, settings: AlgoConfig) -> Algorithms:
        """Return these algorithms, with one transform replaced by a transform with the given settings."""
        return attrs.evolve(self, transforms={**self.transforms, registered_name(settings): _processor(settings)})

    def checked_rounding(self) -> CheckedRounding:
        """Return the rounding as an object that checks its results."""
        name = self.rounding_name
        return CheckedRounding(self.rounding, None if name is None else origin("algorithms", name))

    def checked_tunings(self) -> dict[str, Tuning]:
        """Return the tunings as objects that check their results."""
        return {name: CheckedTuning(tuning, origin("algorithms", name)) for name, tuning in self.tunings.items()}

    def started_transforms(self, model: nn.Module, plan: QuantPlan) -> list[StartedTransform]:
        """Start the transforms with a model and its plan, and return them as objects that check their
        results.
        """
        return [StartedTransform.of(transform, model, plan, origin("algorithms", name)) for name, transform in self.transforms.items()]


def algorithms_of(config: QConfig) -> Algorithms:
    """Create the algorithms that a configuration names.

    Raises:
        UnsupportedError: A distribution registers the configuration of an algorithm but does not implement
            it.
        ConfigError: An algorithm is named twice. Or there are two roundings, or two transforms with the same
            role. Or no order of the algorithms is allowed.
    """
    names = [registered_name(settings) for settings in config.algo_config or []]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the algorithm '{name}' is named twice, but a run can use it only once. Name it once")
    records = {name: algorithms().get(name) for name in names}
    for name in names:
        require_processor(name, named_in="algo_config")
    roundings = [name for name, record in records.items() if record.kind == "rounding"]
    branchings = [name for name, record in records.items() if record.kind == "branch"]
    for alike, do in ((roundings, "choose the codes of weights"), (branchings, "add branches to layers")):
        if len(alike) > 1:
            raise ConfigError(f"'{alike[0]}' and '{alike[1]}' both {do}, but a run can have only one such algorithm. Name one of them")
    order_of = {kind: in_order({n: r for n, r in records.items() if r.kind == kind}) for kind in ("transform", "block_tuning")}
    branching = branching_of(config)
    settings_of = {registered_name(settings): own_settings(settings) for settings in config.algo_config or []}
    made = {name: _processor(settings) for name, settings in settings_of.items() if name not in branchings}
    transforms: dict[str, Transform] = {name: made[name] for name in order_of["transform"]}
    tunings: dict[str, Tuning] = {name: made[name] for name in order_of["block_tuning"]}
    if roundings:
        return Algorithms(transforms, made[roundings[0]], roundings[0], tunings, branching)
    for name, transform in transforms.items():
        if (rounding := transform.rounding()) is not None:
            return Algorithms(transforms, rounding, name, tunings, branching)
    return Algorithms(transforms, tunings=tunings, branching=branching)


def in_order(records: Mapping[str, AlgorithmRecord]) -> list[str]:
    """Return the names of transforms, or of tunings, in an order that their records allow.

    The attributes ``before`` and ``after`` of the records restrict the order. If they allow several orders,
    the algorithms stay in the order of the settings.

    Args:
        records: Records of the algorithms, by the names in the settings.

    Raises:
        ConfigError: Two algorithms have the same role, or the required order is circular.
    """
    roles: dict[str, str] = {}
    for name, record in records.items():
        if record.role is not None and (other := roles.setdefault(record.role, name)) != name:
            sources = " and ".join(dict.fromkeys((_source(other), _source(name))))
            raise ConfigError(
                f"'{records[other].name}' and '{record.name}' (of {sources}) have the same role '{record.role}', so the "
                "second would undo the first. Name only one of them"
            )
    earlier = {name: _earlier(name, records) for name in records}
    order: list[str] = []
    while len(order) < len(records):
        ready = next((n for n in records if n not in order and earlier[n] <= set(order)), None)
        if ready is None:
            circle = _circle({n: names - set(order) for n, names in earlier.items() if n not in order})
            names = " and ".join(f"'{n}' (of {_source(n)})" for n in circle)
            raise ConfigError(
                f"no order of {names} is possible: their records ('before' and 'after') require each before the next, and the last before "
                "the first. Leave out one of these algorithms"
            )
        order.append(ready)
    return order


def _earlier(name: str, records: Mapping[str, AlgorithmRecord]) -> set[str]:
    """Return the names of the algorithms that must come before the algorithm ``name``."""
    own = records[name]
    return {
        other
        for other, record in records.items()
        if other != name and (_names(record) & set(own.after) or _names(own) & set(record.before))
    }


def _names(record: AlgorithmRecord) -> set[str]:
    """Return the names that other records may use for an algorithm: its name, its aliases and its role."""
    return {record.name, *record.aliases, *([record.role] if record.role else [])}


def _circle(earlier: Mapping[str, set[str]]) -> Sequence[str]:
    """Return a cycle of algorithms: each of them must come before the next one.

    Args:
        earlier: For each algorithm, the algorithms that must come before it. Each has at least one.
    """
    path = [next(iter(earlier))]
    while (before := min(earlier[path[-1]])) not in path:
        path.append(before)
    return path[path.index(before) :][::-1]


def registered_name(settings: AlgoConfig) -> str:
    """Return the registered name of the algorithm that ``settings`` belong to. They may name it by an alias.

    If the algorithm is not installed, return the name in the settings.
    """
    return algorithms().get(settings.name).name if settings.name in algorithms() else str(settings.name)


def own_settings(settings: AlgoConfig) -> AlgoConfig:
    """Convert settings that were read from JSON to the algorithm's own class, and return the resolved
    settings.

    Raises:
        ConfigError: The settings have another class, or keys that the algorithm does not have.
        UnknownNameError: No installed distribution has an algorithm with this name.
    """
    if isinstance(settings, StoredAlgoConfig):
        settings = algo_config_from_dict(settings.to_dict())
    own = algorithms().load_config(settings.name)
    if not isinstance(settings, own):
        raise ConfigError(
            f"algo_config has a {type(settings).__name__} for '{settings.name}', but this algorithm's settings must be a {own.__name__}"
        )
    return settings.resolved()


def _source(name: str) -> str:
    source = algorithms().source(name)
    return f"{source.distribution} {source.version}"


def _processor(settings: AlgoConfig) -> Any:
    """Create the transform, rounding or tuning for an algorithm's settings, and check its class."""
    whose = origin("algorithms", settings.name)
    processor = algorithms().load_processor(settings.name)
    with attributed("being made of its settings", whose):
        algorithm = processor(settings)
        refuse_strange(algorithm, algorithms().get(settings.name).kind, whose)
    return algorithm


def settings_told(config: QConfig) -> dict[str, Any]:
    """Return the fields of `quark.plugins.RunStarted` that describe a configuration."""
    return {"scheme": config.scheme, "algorithms": tuple(registered_name(settings) for settings in config.algo_config or ())}


def refuse_excluded_schemes(rounding: str, rows: Iterable[PlanRow]) -> None:
    """Check that a rounding gets no weight whose scheme the record of the rounding excludes.

    A layer's configuration does not name a scheme. A weight matches a scheme if the number formats,
    granularities, symmetry and scale formats of all levels are equal. The group size may differ.

    Args:
        rounding: Name of the rounding.
        rows: The rows of the plan.

    Raises:
        UnsupportedError: A layer has an excluded scheme. The message names the scheme, the layer and the
            reason.
    """
    record = algorithms().get(rounding)
    excluded = {name: reason for name, reason in record.excluded_schemes.items() if name in schemes()}
    if not excluded:
        return
    kinds = {_kind(schemes().load_config(name)().weight): name for name in excluded}
    for row in rows:
        if row.algorithm is None or row.config is None:
            continue
        name = kinds.get(_kind(row.config.weight))
        if name is not None:
            raise UnsupportedError(
                f"the rounding '{rounding}' cannot round '{row.name}', whose weight has the scheme '{name}': {excluded[name]}. Choose "
                "another scheme for this layer, or leave out the algorithm"
            )


def refuse_vectors(algorithms: Algorithms, rows: Iterable[PlanRow]) -> None:
    """Check that no algorithm chooses single elements in a format that encodes several elements together.

    Args:
        algorithms: The algorithms of the run.
        rows: The rows of the plan, each with the name of its rounding.

    Raises:
        UnsupportedError: An algorithm chooses single elements in such a format. The message names the
            algorithm, a layer and the format.
    """
    tuning = next(iter(algorithms.tunings), None)
    for row in rows:
        name = None if algorithms.rounding.rounds_vectors else row.algorithm
        if row.config is None or row.config.weight is None or (name or tuning) is None:
            continue
        number_format = quantizer_for(row.config.weight, activation=False).stored_level.format
        if number_format.vector > 1:
            raise UnsupportedError(
                f"'{name or tuning}' chooses the elements of a weight one by one, but '{number_format.name}', the format of '{row.name}', "
                f"encodes {number_format.vector} elements together. Choose gptq, no rounding algorithm, or another scheme for this layer"
            )


def _kind(weight: QTensorConfig | Sequence[QTensorConfig] | None) -> Kind:
    """Return a key for the scheme of a weight. The keys of two weights are equal if their schemes are
    equal.
    """
    if weight is None:
        return ()
    return tuple((level.dtype, level.qscheme, level.symmetric, level.scale_format, level.is_scale_quant) for level in levels(weight))
