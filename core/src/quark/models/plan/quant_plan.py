"""`QuantPlan` describes how each layer will be quantized and why. A plan needs only modules and shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import attrs
from torch import nn

from quark.base.names import folded
from quark.config.architecture import Architecture
from quark.config.layer import ACTIVATIONS, QLayerConfig, Slot, TensorSpec, levels
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.hf.dequantizer import LayerCodes
from quark.models.hf.internals import tied_on_loading
from quark.models.layers import QuantizedLayer, is_quantized, share_codes
from quark.models.layers.layer_types import LayerShape, layer_type_of
from quark.models.layers.layers_from_codes import Packed
from quark.models.plan.attention import AttentionPlanning, AttentionRow
from quark.models.plan.family import stated_family
from quark.models.plan.layer_notes import layer_notes, nothing_quantized
from quark.models.plan.mixtures import fused_parameters
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.plan_text import plan_lines
from quark.models.plan.rules import Rule, layer_config_for, rules_of
from quark.numbers import quantizer_for
from quark.numbers.self_check import refuse_broken
from quark.plugins import schemes, templates


@attrs.frozen
class QuantPlan:
    """The plan of one run.

    Attributes:
        rows: One row for each layer that could be quantized, in the order of the model's modules.
        config: The configuration of the run. Settings that depend on the model have been decided.
        architecture: Facts about the model family. None means that the family is unknown.
        notes: Remarks for the user that need no action.
        attentions: A row for each attention module with quantized tensors.
        rules: A `Rule` for each pattern and each layer type of the configuration.
        warnings: Sentences about settings that are probably unintended, and about rules without effect.
        carried: Full names of tensors of the float checkpoint that the model class does not use, such as
            layers for multi-token prediction. An export copies them unchanged.
        carried_names: Full names that an export adds to its excluded layers because of ``carried``. For each
            tensor, this is the name of its module, or the tensor's name if the model has this module.
    """

    rows: tuple[PlanRow, ...]
    config: QConfig = attrs.field(eq=False)
    architecture: Architecture | None = None
    notes: tuple[str, ...] = ()
    attentions: tuple[AttentionRow, ...] = ()
    rules: tuple[Rule, ...] = ()
    warnings: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    carried_names: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the plan as aligned lines of text."""
        return "\n".join(plan_lines(self))

    def carrying(self, names: Sequence[str], model: nn.Module) -> Self:
        """Return a copy of this plan of ``model``, in which `carried` contains the tensors ``names``."""
        if not names:
            return self
        modules = {name for name, _ in model.named_modules()}
        listed = (name if (owner := name.rpartition(".")[0]) in modules else owner for name in names)
        note = f"{len(names)} tensor(s) of the checkpoint that a {type(model).__name__} does not use are copied unchanged: "
        return attrs.evolve(
            self, carried=tuple(names), carried_names=tuple(dict.fromkeys(listed)), notes=(*self.notes, note + folded(names))
        )

    @property
    def quantized(self) -> tuple[PlanRow, ...]:
        """Rows of the layers with at least one quantized tensor."""
        return tuple(r for r in self.rows if r.config is not None)

    @property
    def distinct(self) -> tuple[PlanRow, ...]:
        """The rows of `quantized`, but only the row of the first name if a module has several names."""
        return tuple(r for r in self.quantized if r.same_as is None)

    @property
    def kept(self) -> tuple[str, ...]:
        """Full names of the layers that keep the quantization of the source."""
        return tuple(r.name for r in self.rows if r.is_kept)

    @property
    def excluded(self) -> tuple[str, ...]:
        """Full names of the layers whose weight stays float, except those with `PlanRow.is_by_name`."""
        return tuple(r.name for r in self.rows if (r.config is None or r.config.weight is None) and not r.is_by_name)

    @property
    def calibrated(self) -> tuple[PlanRow | AttentionRow, ...]:
        """Rows with at least one activation that needs calibration data, because it has static scales."""
        # A layer that keeps its quantization already has the scale of its input.
        layers = (r for r in self.quantized if any(not (r.is_kept and s is Slot.input_tensors) for s in static_activations(r.config)))
        return (*layers, *(a for a in self.attentions if has_static_scale(a.probabilities)))

    def sharing(self, layers: Collection[str]) -> dict[str, str]:
        """Return a dictionary from a layer to the layer whose codes it uses. Both names are in ``layers``."""
        return {r.name: source for r in self.rows if (source := r.shares_codes_of) is not None and {r.name, source} <= set(layers)}

    def share_codes(self, layers: Mapping[str, QuantizedLayer]) -> None:
        """Make the layers share codes as planned, in place. Keys of ``layers`` are full names."""
        for name, source in self.sharing(layers).items():
            share_codes(layers[name], layers[source])

    def with_own_codes(self, names: Collection[str]) -> Self:
        """Return a copy of this plan in which the layers ``names`` have codes of their own.

        Use it if the weights of these layers will differ from those of the layers to which they are tied.
        """
        by_name = {row.name: row for row in self.rows}
        apart = [(r, by_name[source]) for r in self.rows if r.name in names and (source := r.shares_codes_of) is not None]
        own = {row.name: attrs.evolve(row, shares_codes_of=None) for row, _ in apart}
        note_of = {_of_tie(row, source): _of_tie(own[row.name], source) for row, source in apart}
        rows = tuple(own.get(row.name, row) for row in self.rows)
        return attrs.evolve(self, rows=rows, notes=tuple(note_of.get(note, note) for note in self.notes))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in the JSON form in which it is saved in the output directory."""
        rows = [attrs.asdict(r, filter=lambda a, _: a.name != "config") | {"config": r.config and r.config.to_dict()} for r in self.rows]
        return {
            "rows": rows,
            "attentions": [attention.to_dict() for attention in self.attentions],
            "notes": list(self.notes),
            "rules": [attrs.asdict(rule) for rule in self.rules],
            "warnings": list(self.warnings),
            "carried": list(self.carried),
            "model_type": self.architecture and self.architecture.model_type,
        }


def static_activations(layer: QLayerConfig | None) -> Iterator[Slot]:
    """Yield the slots of activations that have static scales. These activations need calibration."""
    for slot in ACTIVATIONS:
        if layer is not None and has_static_scale(getattr(layer, slot)):
            yield slot


def has_static_scale(spec: TensorSpec | None) -> bool:
    """Return whether an activation with the spec ``spec`` has a static scale. If so, it needs calibration."""
    return spec is not None and any(s.is_dynamic is False for s in levels(spec)) and not quantizer_for(spec, activation=True).is_float


def make_plan(
    model: nn.Module, config: QConfig, architecture: Architecture | None = None, codes_of: CodesOf = MappingProxyType({})
) -> QuantPlan:
    """Do all checks that need no data, and return the plan of ``model``.

    If the configuration does not quantize a layer that is in ``codes_of``, the layer keeps its quantization
    in the source.

    Raises:
        ConfigError: Layers are already quantized, a group size does not divide an axis, or a spec is
            incomplete. Or the configuration is ``strict``, and a pattern matches nothing or a layer type
            cannot be quantized. One message contains all errors.
        PluginError: The self-check of a format or an observer fails.
    """
    quantized = [name for name, m in model.named_modules() if is_quantized(m) or isinstance(m, Packed)]
    if quantized:
        raise ConfigError(
            f"this model is quantized already: {len(quantized)} layers, {folded(quantized)}. "
            "Load the float model again to quantize it differently"
        )
    rows = _with_shared_codes(model, tuple(_kept(row, codes_of.get(row.name)) for row in plan_rows(model, config, architecture)))
    requested_post_rope = config.kv_cache_post_rope
    attention = AttentionPlanning(model, rows, config, architecture).resolved()
    config = attention.config
    rules = rules_of(model, config, architecture)
    errors = [
        *(rule.problem for rule in rules if rule.problem and config.strict),
        *_misfits(rows, config.scheme),
        *_contradictions(rows),
        *attention.errors(requested_post_rope),
    ]
    if errors:
        raise ConfigError("\n".join(errors))
    _refuse_broken_plugins(rows, attention.rows)
    problems = (rule.problem for rule in rules if rule.problem)
    warnings = (*problems, *nothing_quantized(rows, config), *_not_kept(rows, codes_of), *attention.warnings(requested_post_rope))
    return QuantPlan(rows, config, architecture, tuple(_notes(rows, model, architecture)), attention.rows, rules, warnings)


def plan_rows(model: nn.Module, config: QConfig, architecture: Architecture | None = None) -> tuple[PlanRow, ...]:
    """Return one row for each name of a quantizable layer of ``model``, in the order of the model's modules.

    The function does not check whether specs fit the layers. If the architecture names decoder blocks,
    settings of the KV cache apply only to layers in decoder blocks. Code that reads an export passes no
    architecture, because the configuration in an export has exact layer names.
    """
    blocks = architecture.decoder_blocks if architecture is not None else None
    prefix = "" if blocks is None else f"{blocks}."
    rows: list[PlanRow] = []
    first_owner: dict[int, str] = {}
    first_name: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        layer_type = layer_type_of(module)
        if layer_type is None:
            continue
        weight: Any = module.weight
        owner = first_owner.setdefault(id(weight), name)
        resolved = layer_config_for(config, name, layer_type.planned_as, has_cache=name.startswith(prefix))
        shape = LayerShape.of(module)
        tied_to = None if owner == name else owner
        known = first_name.setdefault(module, name)
        row = PlanRow(name, layer_type.planned_name, shape.weight, resolved.config, resolved.reason, tied_to, groups=shape.groups)
        rows.append(row if known == name else attrs.evolve(row, same_as=known))
    return tuple(rows)


def refuse_misfits(rows: tuple[PlanRow, ...]) -> None:
    """Raise an error if a spec does not fit its layer. Readers of checkpoints call this, and not `make_plan`.

    Raises:
        ConfigError: Specs do not fit their layers. One message contains all errors.
    """
    empty = [row.name for row in rows if row.config is not None and 0 in row.shape]
    if empty:
        raise ConfigError(f"{len(empty)} layer(s) that are to be quantized have weights without elements: {folded(empty)}")
    if errors := list(_misfits(rows, None)):
        raise ConfigError("\n".join(errors))


def _misfits(rows: tuple[PlanRow, ...], scheme: str | None) -> Iterator[str]:
    """Yield an error for each reason why specs do not fit. ``scheme`` is the scheme of the run, or None."""
    rows_of: dict[tuple[tuple[str, ...], str], list[PlanRow]] = {}
    for row in rows:
        slots: dict[str, list[str]] = {}
        for slot in Slot:
            spec = None if row.config is None else getattr(row.config, slot)
            if spec is not None and (error := row.shape_error(slot, spec)) is not None:
                slots.setdefault(error, []).append(slot)
        for error, failing in slots.items():
            rows_of.setdefault((tuple(failing), error), []).append(row)
    for (wrong_slots, error), misfits in rows_of.items():
        names, reason = folded(r.name for r in misfits), f"{' and '.join(wrong_slots)}: {error}"
        yield f"{len(misfits)} layer(s) cannot be quantized as asked ({reason}): {names}. {_fix(misfits, scheme)}"


def _contradictions(rows: Sequence[PlanRow]) -> Iterator[str]:
    """Yield an error for each module with two names that the configuration quantizes in different ways."""
    configs = {row.name: row.config for row in rows}
    for row in rows:
        if row.same_as is not None and row.config != configs[row.same_as]:
            yield (
                f"'{row.name}' and '{row.same_as}' are one module, but the configuration quantizes them differently. Change its patterns "
                "so that they match both names or neither, or use two modules"
            )


def _fix(misfits: Sequence[PlanRow], scheme: str | None) -> str:
    """Return sentences that say how to fix misfits. They name the schemes that fit, if there are any."""
    fitting = _fitting_schemes(misfits)
    others = ", ".join(name for name in fitting if name != scheme)
    fixes = [f"Schemes of the same format that fit: {others}."] if others else []
    fixes += [f"The scheme '{scheme}' fits with its default options."] if scheme in fitting else []
    return " ".join(fixes) or "Exclude these layers, or give them another scheme."


def _refuse_broken_plugins(rows: tuple[PlanRow, ...], attentions: Sequence[AttentionRow]) -> None:
    """Run the self-checks of all formats and observers in the plan. Raise PluginError if a check fails."""
    specs = [(getattr(r.config, slot), slot.is_activation) for r in rows if r.config is not None for slot in Slot]
    specs += [(spec, True) for a in attentions for spec in (a.probabilities, a.query, a.key, a.value)]
    # Two-level specs are lists, which cannot be hashed, but their levels can.
    distinct = {(levels(spec), is_activation): spec for spec, is_activation in specs if spec is not None}
    for (_, is_activation), spec in distinct.items():
        refuse_broken(quantizer_for(spec, activation=is_activation), activation=is_activation)


def _fits(row: PlanRow, layer: QLayerConfig) -> bool:
    return all((spec := getattr(layer, slot)) is None or row.shape_error(slot, spec) is None for slot in Slot)


def _fitting_schemes(bad: Sequence[PlanRow]) -> list[str]:
    """Return the names of the schemes that fit all rows ``bad`` and have the weight format of the first."""
    config = bad[0].config
    formats = {s.dtype for s in levels(config.weight if config else None)}
    fitting = []
    for name in schemes().names():
        layer = schemes().load_config(name)()
        same_format = layer.weight is not None and {s.dtype for s in levels(layer.weight)} == formats
        if same_format and all(_fits(row, layer) for row in bad):
            fitting.append(name)
    return fitting


def _notes(rows: tuple[PlanRow, ...], model: nn.Module, architecture: Architecture | None) -> Iterator[str]:
    if (stated := stated_family(model)) is not None:
        yield from stated.notes
    if architecture is not None and templates().find_architecture(architecture.model_type) is None:
        yield (
            f"no plugin provides a template for the model type '{architecture.model_type}': its blocks were inferred from its modules, at "
            f"{', '.join(map(repr, architecture.block_lists))}"
        )
    fused = list(fused_parameters(model))
    if fused:
        yield (f"{len(fused)} fused matrices of experts stay float, because they are excluded or cannot be separated: {folded(fused)}")
    yield from layer_notes(rows, model)
    owners = {row.name: row for row in rows}
    if same := [row for row in rows if row.same_as is not None and row.config is not None]:
        yield (
            f"{len(same)} layer name(s) are second names of shared modules, which are calibrated on the inputs under their first names: "
            + folded(f"{row.name} = {row.same_as}" for row in same)
        )
    for row in rows:
        owner = owners[row.shares_codes_of or row.tied_to or row.name]
        is_told = owner is row or row.same_as is not None or owner.shares_codes_of == row.name
        if not is_told and (row.has_quantized_weight or owner.has_quantized_weight):
            yield _of_tie(row, owner)


def _with_shared_codes(model: nn.Module, rows: tuple[PlanRow, ...]) -> tuple[PlanRow, ...]:
    """Set `PlanRow.shares_codes_of` for tied layers whose weights have the same spec, and return all rows.

    Only layers that transformers ties on loading share codes, because transformers also ties them in an
    export. Other layers that share a parameter get separate codes.
    """
    by_name, made = {row.name: row for row in rows}, {}
    for name, source in tied_on_loading(model).items():
        row, owner = (by_name.get(path.removesuffix(".weight")) for path in (name, source))
        if row is not None and owner is not None and (row.tied_to or row.name) == (owner.tied_to or owner.name) and _are_alike(row, owner):
            made[row.name] = attrs.evolve(row, shares_codes_of=owner.name)
    return tuple(made.get(row.name, row) for row in rows)


def _are_alike(one: PlanRow, other: PlanRow) -> bool:
    specs = [None if row.config is None or row.is_kept or row.same_as is not None else row.config.weight for row in (one, other)]
    if specs[0] is None or specs[0] != specs[1] or one.shape != other.shape:
        return False
    return one.quantizer(Slot.weight, specs[0]) == other.quantizer(Slot.weight, specs[0])


def _of_tie(row: PlanRow, owner: PlanRow) -> str:
    """Return a note that says what happens to the weight that ``row`` and ``owner`` share.

    The weight of at least one of the two layers is quantized.
    """
    if row.shares_codes_of is not None:
        return (
            f"'{row.name}' shares its weight with '{owner.name}', and both are quantized alike: the weight stays one tensor, is rounded "
            f"to nearest, and is stored once, in {row.weight_bytes:,} bytes"
        )
    if not row.has_quantized_weight:
        return f"'{owner.name}' will be quantized, but '{row.name}', which shares its weight, stays float: each gets its own weight"
    if owner.has_quantized_weight:
        return f"'{row.name}' shares its weight with '{owner.name}' and both will be quantized: each gets its own codes, and its own weight"
    return (
        f"'{row.name}' shares its weight with '{owner.name}' and will be quantized: it gets its own weight, '{owner.name}' stays "
        "float. vLLM without quark-vllm cannot load a quantized output head. If it must load the checkpoint, exclude the head"
    )


CodesOf = Mapping[str, LayerCodes | None]
"""Dictionary from the full name of each layer that is quantized in the source to its stored codes. The value
is None if no `QLayerConfig` expresses the quantization exactly.
"""


def is_left_alone(row: PlanRow) -> bool:
    """Return whether a configuration quantizes neither the weight nor the input of a layer.

    The output of the layer may still be quantized, because it enters a quantized cache.
    """
    return row.config is None or attrs.evolve(row.config, output_tensors=None) == QLayerConfig()


def _kept(row: PlanRow, codes: LayerCodes | None) -> PlanRow:
    """Return a row with the stored quantization if the layer keeps it. If not, return ``row`` unchanged."""
    if codes is None or not is_left_alone(row) or not row.is_linear or codes.shape != row.shape or not _fits(row, codes.config):
        return row
    output = None if row.config is None else row.config.output_tensors
    config = codes.config if output is None else attrs.evolve(codes.config, output_tensors=output)
    return attrs.evolve(row, config=config, is_kept=True, reason=f"{row.reason}; kept as quantized in the source")


def _not_kept(rows: Sequence[PlanRow], codes_of: CodesOf) -> Iterator[str]:
    """Yield a warning if layers that are quantized in the source are float in the result."""
    known = {row.name: row for row in rows}
    floats = {name for name, row in known.items() if is_left_alone(row)}
    # A layer without a row, as in a fused expert, counts as float if a layer of the same module stays float.
    owners = {name.rpartition(".")[0] for name in floats}
    names = [name for name in codes_of if name in floats or (name not in known and name.rpartition(".")[0] in owners)]
    if names:
        yield (
            f"{len(names)} layer(s) are quantized in the source but written dequantized, because quark cannot express their quantization "
            f"exactly: {folded(names)}. To accept this, set keep_prequantized_layers=False (--no-keep-prequantized)"
        )
