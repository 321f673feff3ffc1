"""The plan as a person reads it: layers that differ only in their block's number are one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from quark.model.plan import PlanRow, QuantPlan
from quark.nn.attention import KEY, QUERY, VALUE
from quark.specs.describe import describe_activation, describe_layer

_STATES = {"queries": QUERY, "keys": KEY, "values": VALUE}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _numbers(rows: Iterable[PlanRow]) -> str:
    found = sorted({int(m.group()) for r in rows if (m := _NUMBER.search(r.name))})
    contiguous = found == list(range(found[0], found[-1] + 1)) if found else False
    return "" if not found else f"{found[0]}-{found[-1]}" if contiguous and len(found) > 1 else ",".join(map(str, found))


def _attention_lines(plan: QuantPlan) -> Iterator[str]:
    of_probabilities = sum(1 for a in plan.attentions if a.probabilities is not None)
    states = {word: sum(1 for a in plan.attentions if state in a.states) for word, state in _STATES.items()}
    if of_probabilities:
        yield f"  attention: probabilities of {of_probabilities} modules {describe_activation(plan.config.softmax_quant_spec)}"
    for word, count in states.items():
        if count:
            yield f"  attention: {word} of {count} modules as attention gets them, after the rotary embedding"


def plan_lines(plan: QuantPlan) -> list[str]:
    """The plan as lines of text, aligned."""
    grouped: dict[tuple[str, str, str, tuple[int, ...]], list[PlanRow]] = {}
    for row in plan.rows:
        what = describe_layer(row.config) + (f", by {row.algorithm}" if row.algorithm else "")
        grouped.setdefault((_pattern(row.name), what, row.reason, row.shape), []).append(row)
    table = [
        (pattern.replace("*", f"{{{_numbers(rows)}}}", 1), "×".join(map(str, shape)), what, reason)
        for (pattern, what, reason, shape), rows in grouped.items()
    ]
    widths = [max((len(line[i]) for line in table), default=0) for i in range(3)]
    lines = [f"  {n:<{widths[0]}}  {s:<{widths[1]}}  {w:<{widths[2]}}  ({r})" for n, s, w, r in table]
    weights = sum(1 for r in plan.quantized if r.config is not None and r.config.weight is not None)
    head = f"Plan: {weights} of {len(plan.rows)} layers get a quantized weight" + (
        "; calibration data are needed" if plan.calibrated else ""
    )
    return [head, *lines, *_attention_lines(plan), *(f"  note: {note}" for note in plan.notes), *warning_lines(plan)]


def warning_lines(plan: QuantPlan) -> list[str]:
    """Those lines of the plan that warn."""
    return [f"  warning: {warning}" for warning in plan.warnings]
