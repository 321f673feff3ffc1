"""QuantPlan: what will be done to each layer and why, as data; made before anything is touched, from structure and shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig, TensorSpec, levels
from quark.config.model import QConfig
from quark.config.slot import ACTIVATIONS, Slot
from quark.errors import ConfigError
from quark.modules.layer_types import planned_names
from quark.modules.layers import counts_as, is_quantized, linear_weight
from quark.names import folded
from quark.planning.attention import (
    AttentionRow,
    attention_errors,
    attention_facts,
    attention_rows,
    attention_warnings,
    resolve_attention,
)
from quark.planning.mixtures import fused_parameters
from quark.planning.patterns import Rule, rules_of
from quark.planning.precedence import layer_config_for
from quark.plugins import schemes, templates
from quark.quantizers import quantizer_for
from quark.quantizers.self_check import refuse_broken

__all__ = ["PlanRow", "QuantPlan", "has_static_scale", "make_plan", "plan_rows", "refuse_misfits", "static_activations"]


@attrs.frozen
class PlanRow:
    """One layer.

    Attributes:
        name: Full module name.
        module_type: Name of the class that the float module counts as (`quark.modules.layers.counts_as`).
        shape: Of the weight, ``[out, in]`` of a linear layer, whichever way it lies.
        config: What it gets; None where it stays float.
        reason: Which rule said so.
        algorithm: Name of the algorithm that chooses the weight's codes; None where they are rounded to nearest.
        tied_to: Full name of the module whose parameter this one shares; None where it shares none.
    """

    name: str
    module_type: str
    shape: tuple[int, ...]
    config: QLayerConfig | None
    reason: str
    tied_to: str | None = None
    algorithm: str | None = None

    @property
    def quantized_to(self) -> QLayerConfig:
        """The configuration of a layer that is quantized; those of `QuantPlan.quantized` are."""
        if self.config is None:
            raise ValueError(f"'{self.name}' stays float: it has no configuration")
        return self.config


@attrs.frozen
class QuantPlan:
    """The plan of one run.

    Attributes:
        rows: One per layer that could be quantized, in the model's order.
        config: The configuration it was made from; what that leaves to the model is resolved.
        architecture: Facts about the model family, None where it is not known.
        notes: Remarks worth reading that are no errors.
        attentions: The attention modules of which something is quantized.
        rules: The configuration's patterns and layer types, and how many layers each matches.
        warnings: What is done as asked, and may be other than what was meant; what was asked for and can have no effect.
    """

    rows: tuple[PlanRow, ...]
    config: QConfig = attrs.field(eq=False)
    architecture: Architecture | None = None
    notes: tuple[str, ...] = ()
    attentions: tuple[AttentionRow, ...] = ()
    rules: tuple[Rule, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[PlanRow, ...]:
        """Rows of the layers that get something quantized."""
        return tuple(r for r in self.rows if r.config is not None)

    @property
    def excluded(self) -> tuple[str, ...]:
        """Full names of the layers whose weight and input stay float, embeddings apart."""
        lookups = planned_names(lookup=True)
        return tuple(r.name for r in self.rows if r.module_type not in lookups and (r.config is None or r.config.weight is None))

    @property
    def calibrated(self) -> tuple[PlanRow | AttentionRow, ...]:
        """Rows whose activations have static scales, so that calibration data are needed."""
        layers = (r for r in self.quantized if any(True for _ in static_activations(r.config)))
        return (*layers, *(a for a in self.attentions if has_static_scale(a.probabilities)))

    def to_dict(self) -> dict[str, Any]:
        """JSON form, saved beside the result."""
        rows = [attrs.asdict(r, filter=lambda a, _: a.name != "config") | {"config": r.config and r.config.to_dict()} for r in self.rows]
        return {
            "rows": rows,
            "attentions": attention_facts(self.attentions),
            "notes": list(self.notes),
            "rules": [attrs.asdict(rule) for rule in self.rules],
            "warnings": list(self.warnings),
            "model_type": self.architecture and self.architecture.model_type,
        }


def static_activations(layer: QLayerConfig | None) -> Iterator[Slot]:
    """The slots of a layer whose activations need calibration: a stage that is static and not merely a cast."""
    for slot in ACTIVATIONS:
        if layer is not None and has_static_scale(getattr(layer, slot)):
            yield slot


def has_static_scale(spec: TensorSpec | None) -> bool:
    """Whether an activation of that spec needs calibration."""
    return spec is not None and any(s.is_dynamic is False for s in levels(spec)) and not quantizer_for(spec, activation=True).is_float


def make_plan(model: nn.Module, config: QConfig, architecture: Architecture | None = None) -> QuantPlan:
    """Resolve every layer of ``model`` (meta tensors will do) and check all that can be known without data.

    Raises:
        ConfigError: All that is wrong, in one message: layers that are quantized already, groups that do not divide, specs that lack
            something; and where the configuration is ``strict``, patterns that match nothing and layer types that cannot be quantized.
        PluginError: A format or an observer does not do what it promises.
    """
    quantized = [name for name, m in model.named_modules() if is_quantized(m)]
    if quantized:
        raise ConfigError(
            f"this model is quantized already: {len(quantized)} layers, {folded(quantized)}. "
            "Load the float model again to quantize it differently"
        )
    rows = plan_rows(model, config, architecture)
    asked, config = config.kv_cache_post_rope, resolve_attention(model, rows, config, architecture)
    attentions = attention_rows(model, rows, config, architecture)
    rules = rules_of(model, config, architecture)
    problems = [
        *(rule.problem for rule in rules if rule.problem and config.strict),
        *_misfits(rows, config.scheme),
        *attention_errors(model, attentions, rows, config, architecture, asked),
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    _refuse_broken_plugins(rows, attentions)
    warnings = (*(r.problem for r in rules if r.problem), *attention_warnings(model, rows, config, architecture, asked))
    return QuantPlan(rows, config, architecture, tuple(_notes(rows, model, architecture)), attentions, rules, warnings)


def plan_rows(model: nn.Module, config: QConfig, architecture: Architecture | None = None) -> tuple[PlanRow, ...]:
    """One row for each layer of ``model`` that could be quantized, in the model's order. Nothing is checked.

    Where the architecture names decoder blocks, what is said of the cache reaches no layer outside them. Exports have exact names, and are
    read without it.
    """
    blocks = architecture.decoder_blocks if architecture is not None else None
    return tuple(_rows(dict(model.named_modules()), config, "" if blocks is None else f"{blocks}."))


def _rows(modules: dict[str, nn.Module], config: QConfig, inside: str) -> Iterator[PlanRow]:
    first_owner: dict[int, str] = {}
    for name, module in modules.items():
        kind = counts_as(module)
        if kind is None:
            continue
        weight: Any = module.weight
        owner = first_owner.setdefault(id(weight), name)
        found = layer_config_for(config, name, kind, has_cache=name.startswith(inside))
        yield PlanRow(name, kind.__name__, tuple(linear_weight(module).shape), found.config, found.reason, None if owner == name else owner)


def refuse_misfits(rows: tuple[PlanRow, ...]) -> None:
    """Raise where a spec does not fit its layer: what a checkpoint says need not come from a plan that was checked.

    Raises:
        ConfigError: All such specs, in one message.
    """
    empty = [row.name for row in rows if row.config is not None and 0 in row.shape]
    if empty:
        raise ConfigError(f"{len(empty)} layer(s) that are to be quantized have weights without elements: {folded(empty)}")
    if problems := list(_misfits(rows, None)):
        raise ConfigError("\n".join(problems))


def _misfits(rows: tuple[PlanRow, ...], scheme: str | None) -> Iterator[str]:
    """Specs that are incomplete or do not fit their layer, gathered by what is wrong; ``scheme`` is the one that was asked for."""
    found: dict[tuple[tuple[str, ...], str], list[PlanRow]] = {}
    for row in rows:
        slots: dict[str, list[str]] = {}
        for slot in Slot:
            spec = None if row.config is None else getattr(row.config, slot)
            if spec is not None and (problem := _shape_error(row, slot, spec)) is not None:
                slots.setdefault(problem, []).append(slot)
        for problem, failing in slots.items():
            found.setdefault((tuple(failing), problem), []).append(row)
    for (where, problem), bad in found.items():
        asked = f"{' and '.join(where)}: {problem}"
        yield f"{len(bad)} layer(s) cannot be quantized as asked ({asked}): {folded(r.name for r in bad)}. {_cure(bad, scheme)}"


def _cure(bad: Sequence[PlanRow], scheme: str | None) -> str:
    """What could be done instead; the scheme that was asked for fits these layers, if at all, without the options that it was given."""
    fitting = _fitting_schemes(bad)
    others = ", ".join(name for name in fitting if name != scheme)
    cures = [f"Schemes of the same format that fit: {others}."] if others else []
    cures += [f"The scheme '{scheme}' fits with its default options."] if scheme in fitting else []
    return " ".join(cures) or "Exclude these layers, or give them another scheme."


def _shape_error(row: PlanRow, slot: Slot, spec: Any) -> str | None:
    # Weights are [out, in, …]; activations are checked by the features they carry, which is all that is known of them before a run.
    shapes = {
        Slot.weight: row.shape,
        Slot.input_tensors: (1, *row.shape[1:2]),
        Slot.output_tensors: (1, *row.shape[:1]),
        Slot.bias: row.shape[:1],
    }
    return quantizer_for(spec, activation=slot.is_activation).shape_error(shapes[slot])


def _refuse_broken_plugins(rows: tuple[PlanRow, ...], attentions: Sequence[AttentionRow]) -> None:
    """Try the formats and observers of everything that is planned; raises PluginError where one is broken."""
    specs = [(getattr(r.config, slot), slot.is_activation) for r in rows if r.config is not None for slot in Slot]
    specs += [(spec, True) for a in attentions for spec in (a.probabilities, a.query, a.key, a.value)]
    # Two-stage specs are lists, which cannot be compared by hash: their stages can.
    wanted = {(levels(spec), is_activation): spec for spec, is_activation in specs if spec is not None}
    for (_, is_activation), spec in wanted.items():
        refuse_broken(quantizer_for(spec, activation=is_activation), activation=is_activation)


def _fits(row: PlanRow, layer: QLayerConfig) -> bool:
    return all((spec := getattr(layer, slot)) is None or _shape_error(row, slot, spec) is None for slot in Slot)


def _fitting_schemes(bad: Sequence[PlanRow]) -> list[str]:
    """Registered schemes whose weight has the format of the first misfit, and that fit all of them in every slot."""
    asked = bad[0].config
    formats = {s.dtype for s in levels(asked.weight if asked else None)}
    fitting = []
    for name in schemes().names():
        layer = schemes().load_config(name)()
        same = layer.weight is not None and {s.dtype for s in levels(layer.weight)} == formats
        if same and all(_fits(row, layer) for row in bad):
            fitting.append(name)
    return fitting


def _notes(rows: tuple[PlanRow, ...], model: nn.Module, architecture: Architecture | None) -> Iterator[str]:
    if architecture is not None and templates().find_architecture(architecture.model_type) is None:
        yield (
            f"no plugin brings a template for the model type '{architecture.model_type}': its modules show decoder blocks at "
            f"'{architecture.decoder_blocks}', by which it is worked"
        )
    fused = list(fused_parameters(model))
    if fused:
        yield (
            f"{len(fused)} fused matrices of experts stay float: {folded(fused)}. They are excluded, or of a form that "
            "cannot be taken apart"
        )
    for row in rows:
        if row.tied_to is not None and row.config is not None and row.config.weight is not None:
            yield (
                f"'{row.name}' shares its weight with '{row.tied_to}' and is to be quantized: it gets a weight of its own, '{row.tied_to}' "
                "stays float. vLLM cannot load a quantized output head; exclude it unless that is meant"
            )
