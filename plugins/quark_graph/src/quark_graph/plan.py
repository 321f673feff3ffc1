"""`GraphPlan`: the quantization of each operator of a graph. A plan is made before any tensor changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from torch import fx

from quark.base.names import closest, folded, matches
from quark.config.describe import describe_layer
from quark.config.layer import ACTIVATIONS, PARAMETERS, QLayerConfig
from quark.config.model import QConfig
from quark.errors import ConfigError, UnsupportedError
from quark.models.plan.rules import Rule, resolution
from quark.numbers import quantizer_for
from quark.numbers.self_check import refuse_broken
from quark.plugins import graph_ops
from quark_graph.normal_form import NormalForm
from quark_graph.operators import Operator, is_float, operators_in, schema_name, shape_of

__all__ = ["GraphPlan", "GraphRow", "make_graph_plan"]

_PATTERNS = ("exclude", "layer_quant_config")


@attrs.frozen
class GraphRow:
    """The plan of one operator.

    Attributes:
        name: Name of the module if the module consists of this operator. Otherwise the name of the module,
            followed by the name of the node.
        node: Name of the node in the graph.
        operator: Name of the operator's record, such as ``"conv2d"``.
        shape: Shape of the operator's first output.
        config: How the operator is quantized. It is None if the operator is not quantized.
        reason: The rule that decided how the operator is quantized.
    """

    name: str
    node: str
    operator: str
    shape: tuple[int, ...]
    config: QLayerConfig | None
    reason: str


@attrs.frozen
class GraphPlan:
    """The plan of one graph. ``str(plan)`` is a table.

    Attributes:
        rows: One row for each operator that can be quantized, in the order of the graph.
        config: The configuration.
        rules: The patterns and types in the configuration. Each rule has the number of matching operators.
        notes: Remarks for the user. They need no action.
        warnings: Warnings about rules without effect, and about operators that are not quantized because no
            plugin describes them.
    """

    rows: tuple[GraphRow, ...]
    config: QConfig = attrs.field(eq=False)
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[GraphRow, ...]:
        """The rows of operators that have at least one quantized tensor."""
        return tuple(row for row in self.rows if row.config is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dictionary that can be stored as JSON."""
        rows = [attrs.asdict(r, filter=lambda a, _: a.name != "config") | {"config": r.config and r.config.to_dict()} for r in self.rows]
        return {"rows": rows, "rules": [attrs.asdict(r) for r in self.rules], "notes": [*self.notes], "warnings": [*self.warnings]}

    def __str__(self) -> str:
        table = [(row.name, row.operator, "×".join(map(str, row.shape)), _described(row.config), row.reason) for row in self.rows]
        widths = [max((len(line[place]) for line in table), default=0) for place in range(4)]
        lines = [
            "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=False)) + f"  ({line[4]})" for line in table
        ]
        remarks = [*(f"  note: {note}" for note in self.notes), *(f"  warning: {warning}" for warning in self.warnings)]
        return "\n".join([f"Plan: {len(self.quantized)} of {len(self.rows)} operators are quantized", *lines, *remarks])


def make_graph_plan(form: NormalForm, config: QConfig) -> GraphPlan:
    """Decide how each operator is quantized, and check everything that can be checked without data.

    Raises:
        ConfigError: Specs do not fit a tensor. If the configuration is ``strict``, this error is also raised
            if rules have no effect or if operators are unknown. One message lists all errors.
        UnsupportedError: The configuration has algorithms or a quantized KV cache. Graphs support neither of
            them.
        PluginError: A format or an observer fails its self-check.
    """
    _refuse_unsupported(config)
    operators = operators_in(form.model.graph)
    rows = tuple(_row(operator, config) for operator in operators)
    rules = (*_pattern_rules(operators, config), *_type_rules(operators, config))
    warnings = (*(rule.problem for rule in rules if rule.problem), *_unknown(form.model.graph, operators))
    errors = [*(warnings if config.strict else ()), *_misfits(operators, rows)]
    if errors:
        raise ConfigError("\n".join(errors))
    notes = (f"{form.folded} batch norm(s) are folded into the weights in front of them",) if form.folded else ()
    return GraphPlan(rows, config, rules, notes, warnings)


def _described(layer: QLayerConfig | None) -> str:
    """Return a text that describes how the tensors of an operator are quantized.

    The text does not mention a weight that is not quantized.
    """
    return describe_layer(layer).removeprefix("W float, ")


def _row(operator: Operator, config: QConfig) -> GraphRow:
    record = operator.record

    def is_type(key: type | str) -> bool:
        return _type_name(key) in record.type_names

    unless_named = "embeddings stay float unless named" if operator.is_lookup else ""
    resolved = resolution(config, operator.names, is_type, record.name, unless_named)
    layer = resolved.config
    if layer is not None:
        has_weight = record.weight is not None and layer.weight is not None
        layer = attrs.evolve(
            layer,
            weight=layer.weight if has_weight else None,
            bias=layer.bias if has_weight and operator.argument(record.bias) is not None else None,
            input_tensors=None if operator.is_lookup else layer.input_tensors,
        )
    shape = shape_of(operator.outputs[0]) if operator.outputs else ()
    return GraphRow(operator.name, operator.node.name, record.name, shape, None if layer == QLayerConfig() else layer, resolved.reason)


def _refuse_unsupported(config: QConfig) -> None:
    reasons = {
        "algo_config": ("algorithms work on the blocks of a language model", "Leave this field out, or use eager mode"),
        "kv_cache_quant_config": ("a graph has no KV cache", "Use eager mode"),
        "softmax_quant_spec": ("softmax is a separate operator", 'Set layer_type_quant_config={"softmax": QLayerConfig(…)}'),
    }
    for field, (reason, fix) in reasons.items():
        if getattr(config, field):
            raise UnsupportedError(f"{field} has no effect in FX graph mode, because {reason}. {fix}")


def _type_name(key: type | str) -> str:
    return key if isinstance(key, str) else key.__name__


def _pattern_rules(operators: Sequence[Operator], config: QConfig) -> Iterator[Rule]:
    names = [name for operator in operators for name in operator.names]
    for field in _PATTERNS:
        for pattern in getattr(config, field):
            count = sum(any(matches(name, pattern) for name in operator.names) for operator in operators)
            near = closest(pattern.replace("*", "").strip("."), names)
            hint = f"did you mean '{near}'?" if near else f"an operator of this graph is '{names[-1]}'" if names else "the graph has none"
            problem = f"the pattern '{pattern}' in {field} matches no operator that can be quantized, and has no effect; {hint}"
            yield Rule(field, pattern, count, "" if count else problem)


def _type_rules(operators: Sequence[Operator], config: QConfig) -> Iterator[Rule]:
    known = sorted({name for record in graph_ops() for name in record.type_names})
    for key in config.layer_type_quant_config:
        name = _type_name(key)
        count = sum(name in operator.record.type_names for operator in operators)
        if name in known:
            problem = f"layer_type_quant_config names {name}, but this graph has no operator of that type"
        else:
            near = closest(name, known)
            hint = f"did you mean '{near}'? " if near else ""
            problem = f"layer_type_quant_config names {name}, which is not an operator type; {hint}the types are {', '.join(known)}"
        yield Rule("layer_type_quant_config", name, count, "" if count else problem)


def _unknown(graph: fx.Graph, operators: Sequence[Operator]) -> Iterator[str]:
    """Yield a warning if operators that compute with float tensors have no record."""
    known = {operator.node for operator in operators}
    nodes: dict[str, list[str]] = {}
    for node in graph.nodes:
        name = schema_name(node)
        if name is not None and node not in known and is_float(node) and any(is_float(each) for each in node.all_input_nodes):
            nodes.setdefault(name, []).append(node.name)
    if nodes:
        which = "; ".join(f"{name} ({folded(names)})" for name, names in nodes.items())
        yield (
            f"{sum(map(len, nodes.values()))} operator(s) stay float, since no plugin describes them: {which}. To add them, write a "
            f"plugin with the hook quark_register_graph_ops"
        )


def _misfits(operators: Sequence[Operator], rows: Sequence[GraphRow]) -> Iterator[str]:
    """Yield one error for each spec that is incomplete or does not fit its tensors.

    Raises PluginError if a plugin is broken.
    """
    names_of: dict[tuple[str, str], list[str]] = {}
    for operator, row in zip(operators, rows, strict=True):
        for slot in (*PARAMETERS, *ACTIVATIONS):
            spec = None if row.config is None else getattr(row.config, slot)
            if spec is None:
                continue
            refuse_broken(quantizer_for(spec, activation=slot.is_activation), activation=slot.is_activation)
            quantizer = operator.quantizer(slot, spec)
            for error in filter(None, [quantizer.shape_error(shape_of(node)) for node in operator.tensors(slot)]):
                names_of.setdefault((slot.value, error), []).append(row.name)
    for (slot_name, error), names in names_of.items():
        yield (
            f"{len(names)} operator(s) cannot be quantized as asked ({slot_name}: {error}): {folded(names)}. Exclude them, or give them "
            "another spec in layer_quant_config or layer_type_quant_config"
        )
