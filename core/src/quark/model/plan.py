"""QuantPlan: what will be done to each layer and why, as data; made before anything is touched, from structure and shapes alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

import attrs
from torch import nn

from quark.errors import ConfigError
from quark.model.attention import (
    AttentionRow,
    attention_facts,
    attention_problems,
    attention_rows,
    attention_warnings,
    resolve_attention,
)
from quark.model.mixtures import fused_parameters
from quark.model.resolve import layer_config_for
from quark.nn.layers import LOOKUP_TYPES, QUANTIZED_TYPES, counts_as, is_quantized, linear_weight
from quark.numerics import quantizer_for
from quark.plugins import schemes, templates
from quark.specs.architecture import Architecture
from quark.specs.layer import QLayerConfig, TensorSpec, stages
from quark.specs.model import QConfig


@attrs.frozen
class PlanRow:
    """One layer.

    Attributes:
        name: Full module name.
        module_type: Name of the class that the float module counts as (`quark.nn.layers.counts_as`).
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


@attrs.frozen
class QuantPlan:
    """The plan of one run.

    Attributes:
        rows: One per layer that could be quantized, in the model's order.
        config: The configuration it was made from; what that leaves to the model is resolved.
        architecture: Facts about the model family, None where it is not known.
        notes: Remarks worth reading that are no errors.
        attentions: The attention modules of which something is quantized.
        warnings: What is done as asked, and may be other than what was meant.
    """

    rows: tuple[PlanRow, ...]
    config: QConfig = attrs.field(eq=False)
    architecture: Architecture | None = None
    notes: tuple[str, ...] = ()
    attentions: tuple[AttentionRow, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[PlanRow, ...]:
        """Rows of the layers that get something quantized."""
        return tuple(r for r in self.rows if r.config is not None)

    @property
    def excluded(self) -> tuple[str, ...]:
        """Full names of the layers whose weight and input stay float, embeddings apart."""
        lookups = {t.__name__ for t in LOOKUP_TYPES}
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
            "warnings": list(self.warnings),
            "model_type": self.architecture and self.architecture.model_type,
        }


def static_activations(layer: QLayerConfig | None) -> Iterator[str]:
    """The slots of a layer whose activations need calibration: a stage that is static and not merely a cast."""
    for slot in ("input_tensors", "output_tensors"):
        if layer is not None and has_static_scale(getattr(layer, slot)):
            yield slot


def has_static_scale(spec: TensorSpec | None) -> bool:
    """Whether an activation of that spec needs calibration."""
    return spec is not None and any(s.is_dynamic is False for s in stages(spec)) and not quantizer_for(spec, activation=True).is_float


def make_plan(model: nn.Module, config: QConfig, architecture: Architecture | None = None) -> QuantPlan:
    """Resolve every layer of ``model`` (meta tensors will do) and check all that can be known without data.

    Raises:
        ConfigError: All that is wrong, in one message: layers that are quantized already, groups that do not divide, patterns that match
            nothing, layer types that cannot be quantized, specs that lack something.
    """
    modules = dict(model.named_modules())
    quantized = [name for name, m in modules.items() if is_quantized(m)]
    if quantized:
        raise ConfigError(
            f"this model is quantized already: {len(quantized)} layers, the first is '{quantized[0]}'. "
            "Load the float model again to quantize it differently"
        )
    rows = plan_rows(model, config, architecture)
    asked, config = config.kv_cache_post_rope, resolve_attention(model, rows, config, architecture)
    attentions = attention_rows(model, rows, config, architecture)
    problems = [
        *_unquantizable_types(config),
        *_unmatched(rows, modules, config, architecture),
        *_misfits(rows),
        *attention_problems(model, attentions, rows, config, architecture, asked),
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    warnings = tuple(attention_warnings(model, rows, config, architecture, asked))
    return QuantPlan(rows, config, architecture, tuple(_notes(rows, model, architecture)), attentions, warnings)


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


def _unquantizable_types(config: QConfig) -> Iterator[str]:
    known = {t.__name__ for t in QUANTIZED_TYPES}
    for key in config.layer_type_quant_config:
        name = key if isinstance(key, str) else key.__name__
        if name not in known or (isinstance(key, type) and key not in QUANTIZED_TYPES):
            yield (
                f"layer_type_quant_config names {name}, which has no matrix of weights to quantize or is not supported: "
                f"its layers would stay float in silence. Supported types are {', '.join(sorted(known))}; remove the entry for {name}"
            )


def _unmatched(
    rows: tuple[PlanRow, ...], modules: dict[str, nn.Module], config: QConfig, architecture: Architecture | None
) -> Iterator[str]:
    """Patterns that match no layer; those that the model's own template brings may match nothing, as long as one of them does."""
    names = [r.name for r in rows]
    own = set(architecture.with_modules(architecture.exclude_layers_name)) if architecture else set()
    cache = set(architecture.with_modules(architecture.kv_layers_name or ())) if architecture else set()
    cache_found = any(_matches(p, names) for p in cache)
    wanted = {
        "exclude": [p for p in config.exclude if p not in own],
        "layer_quant_config": [p for p in config.layer_quant_config if not (p in cache and cache_found)],
        "kv_cache_quant_config": [p for p in config.kv_cache_quant_config if not (p in cache and cache_found)],
    }
    for field, patterns in wanted.items():
        for pattern in patterns:
            others = field == "exclude" and _matches(pattern, modules)
            if not _matches(pattern, names) and not others:
                example = f"; a layer of this model is '{names[-1]}'" if names else "; this model has no layer that can be quantized"
                yield f"the pattern '{pattern}' in {field} matches no layer that can be quantized{example}"


def _matches(pattern: str, names: Any) -> bool:
    return bool(fnmatch.filter(list(names), pattern))


def _misfits(rows: tuple[PlanRow, ...]) -> Iterator[str]:
    """Specs that are incomplete or do not fit their layer, gathered by what is wrong."""
    found: dict[str, list[PlanRow]] = {}
    for row in rows:
        for slot in ("weight", "input_tensors", "output_tensors", "bias"):
            spec = None if row.config is None else getattr(row.config, slot)
            if spec is not None and (problem := _problem(row, slot, spec)) is not None:
                found.setdefault(f"{slot}: {problem}", []).append(row)
    for problem, bad in found.items():
        names = ", ".join(r.name for r in bad)
        fitting = _fitting_schemes(bad)
        cure = (
            f" Schemes of the same format that fit: {', '.join(fitting)}."
            if fitting
            else " Exclude these layers, or give them another scheme."
        )
        yield f"{len(bad)} layer(s) cannot be quantized as asked ({problem}): {names}.{cure}"


def _problem(row: PlanRow, slot: str, spec: Any) -> str | None:
    # Weights are [out, in, …]; activations are checked by the features they carry, which is all that is known of them before a run.
    shapes = {"weight": row.shape, "input_tensors": (1, *row.shape[1:2]), "output_tensors": (1, *row.shape[:1]), "bias": row.shape[:1]}
    return quantizer_for(spec, activation=slot in ("input_tensors", "output_tensors")).problem(shapes[slot])


def _fitting_schemes(bad: list[PlanRow]) -> list[str]:
    """Registered schemes whose weight has the format of the first misfit and fits all of them."""
    asked = bad[0].config
    formats = {s.dtype for s in stages(asked.weight if asked else None)}
    fitting = []
    for name in schemes().names():
        layer: QLayerConfig = schemes().load(name, "config")()
        same = layer.weight is not None and {s.dtype for s in stages(layer.weight)} == formats
        if same and all(_problem(r, "weight", layer.weight) is None for r in bad):
            fitting.append(name)
    return fitting


def _notes(rows: tuple[PlanRow, ...], model: nn.Module, architecture: Architecture | None) -> Iterator[str]:
    if architecture is not None and architecture.model_type not in templates():
        yield (
            f"no plugin brings a template for the model type '{architecture.model_type}': its modules show decoder blocks at "
            f"'{architecture.decoder_blocks}', by which it is worked"
        )
    fused = list(fused_parameters(model))
    if fused:
        yield (
            f"{len(fused)} fused matrices of experts stay float, the first is '{fused[0]}': they are excluded, or of a form that cannot be "
            "taken apart"
        )
    for row in rows:
        if row.tied_to is not None and row.config is not None and row.config.weight is not None:
            yield (
                f"'{row.name}' shares its weight with '{row.tied_to}' and is to be quantized: it gets a weight of its own, '{row.tied_to}' "
                "stays float. vLLM cannot load a quantized output head; exclude it unless that is meant"
            )
