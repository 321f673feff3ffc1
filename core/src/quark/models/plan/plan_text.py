"""Functions that return a plan as text. Layers with the same plan whose names differ only in numbers share a
line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quark.base.names import fold_names, without_numbers
from quark.config.describe import describe_activation, describe_layer
from quark.models.layers.attention import KEY, QUERY, VALUE
from quark.models.plan.plan_row import PlanRow

if TYPE_CHECKING:
    from quark.models.plan.quant_plan import QuantPlan

_STATES = {"queries": QUERY, "keys": KEY, "values": VALUE}
_MOST_RULES = 16


def _attention_lines(plan: QuantPlan) -> Iterator[str]:
    """Yield the lines about quantized tensors of attention."""
    probabilities = sum(1 for a in plan.attentions if a.probabilities is not None)
    if probabilities:
        yield f"  attention: probabilities of {probabilities} modules {describe_activation(plan.config.softmax_quant_spec)}"
    for word, state in _STATES.items():
        if count := sum(1 for a in plan.attentions if state in a.states):
            yield f"  attention: {word} of {count} modules as attention gets them, after the rotary embedding"


def _rule_lines(plan: QuantPlan) -> Iterator[str]:
    """Yield a line for each field of the configuration that has rules.

    A line lists the rules of its field. The number of layers that a rule matches follows the rule.
    """
    for field in dict.fromkeys(rule.field for rule in plan.rules):
        rules = [rule for rule in plan.rules if rule.field == field]
        more = f", and {len(rules) - _MOST_RULES} more" if len(rules) > _MOST_RULES else ""
        yield f"  {field} matches: {', '.join(f'{rule.rule} {rule.layers}' for rule in rules[:_MOST_RULES])}{more}"


def _shape(row: PlanRow) -> str:
    """Return the shape of a weight as text. The number of output channels comes first.

    If the layer is not linear, the text also contains the name of the layer type.
    """
    shape = "×".join(map(str, row.shape))
    groups = f" in {row.groups} groups" if row.groups > 1 else ""
    return shape if row.is_linear else f"{row.layer_type} {shape}{groups}"


def plan_lines(plan: QuantPlan) -> list[str]:
    """Return the lines of a text that describes the plan. The lines about layers have aligned columns."""
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for row in plan.rows:
        what = describe_layer(row.config) + (f", by {row.algorithm}" if row.algorithm else "")
        grouped.setdefault((without_numbers(row.name), what, row.reason, _shape(row)), []).append(row.name)
    table = [(pattern, shape, what, reason) for (_, what, reason, shape), names in grouped.items() for pattern in fold_names(names)]
    widths = [max((len(line[i]) for line in table), default=0) for i in range(3)]
    lines = [f"  {n:<{widths[0]}}  {s:<{widths[1]}}  {w:<{widths[2]}}  ({r})" for n, s, w, r in table]
    weights = sum(1 for r in plan.quantized if r.has_quantized_weight and not r.is_kept)
    head = f"Plan: {weights} of {len(plan.rows)} layers get a quantized weight"
    head += f"; {len(plan.kept)} keep the quantization of the source" if plan.kept else ""
    head += "; calibration data is needed" if plan.calibrated else ""
    notes = [f"  note: {note}" for note in plan.notes]
    return [head, *lines, *_attention_lines(plan), *_rule_lines(plan), *notes, *warning_lines(plan)]


def warning_lines(plan: QuantPlan) -> list[str]:
    """Return a line of text for each warning of the plan."""
    return [f"  warning: {warning}" for warning in plan.warnings]
