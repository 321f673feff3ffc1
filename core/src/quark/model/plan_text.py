"""The plan as a person reads it: layers that differ only in their block's number are one line."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quark.model.plan import PlanRow, QuantPlan
from quark.specs.enums import QSchemeType
from quark.specs.layer import QLayerConfig, TensorSpec, stages
from quark.specs.tensor import QTensorConfig

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def describe_spec(spec: TensorSpec | None) -> str:
    """A tensor's quantization in a few words: ``int4/group 128``, ``fp8_e4m3/tensor static``, ``float``."""
    return " + ".join(_describe_stage(s) for s in stages(spec)) or "float"


def _describe_stage(stage: QTensorConfig) -> str:
    shape = {
        QSchemeType.per_tensor: "tensor",
        QSchemeType.per_channel: f"channel {stage.ch_axis}",
        QSchemeType.per_group: f"group {stage.group_size}",
        QSchemeType.per_block: f"block {stage.block_size}",
        None: "",
    }[stage.qscheme]
    asymmetric = " asym" if stage.symmetric is False else ""
    scale = f" {stage.scale_format}" if stage.scale_format not in (None, "float32") else ""
    return f"{stage.dtype.name}/{shape}{asymmetric}{scale}".rstrip("/")


def describe_layer(layer: QLayerConfig | None) -> str:
    """What of a layer is quantized: weight, input, output."""
    if layer is None:
        return "float"
    parts = [f"W {describe_spec(layer.weight)}"]
    for label, spec in (("in", layer.input_tensors), ("out", layer.output_tensors), ("bias", layer.bias)):
        if spec is not None:
            when = "" if label == "bias" else " dynamic" if stages(spec)[0].is_dynamic else " static"
            parts.append(f"{label} {describe_spec(spec)}{when}")
    return ", ".join(parts)


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _numbers(rows: Iterable[PlanRow]) -> str:
    found = sorted({int(m.group()) for r in rows if (m := _NUMBER.search(r.name))})
    contiguous = found == list(range(found[0], found[-1] + 1)) if found else False
    return "" if not found else f"{found[0]}-{found[-1]}" if contiguous and len(found) > 1 else ",".join(map(str, found))


def plan_lines(plan: QuantPlan) -> list[str]:
    """The plan as lines of text, aligned."""
    grouped: dict[tuple[str, str, str, tuple[int, ...]], list[PlanRow]] = {}
    for row in plan.rows:
        grouped.setdefault((_pattern(row.name), describe_layer(row.config), row.reason, row.shape), []).append(row)
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
    return [head, *lines, *(f"  note: {note}" for note in plan.notes)]
