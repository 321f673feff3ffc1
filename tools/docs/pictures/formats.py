"""Pictures of number formats: number lines and dynamic ranges from decoded values, bit fields, and bits per
weight."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import torch

from quark.numbers import NumberFormat
from quark.plugins import formats
from quark.plugins.catalog import catalog
from quark_workbench.cli.installed import kind_report
from tools.docs.pictures.svg import BLUE, GREEN, GREY, ORANGE, Drawing
from tools.docs.sections import ROOT

__all__ = ["bit_fields", "bits_per_weight", "dynamic_range", "number_lines", "values_of"]

_LEFT, _WIDTH = 150, 860


def values_of(number_format: NumberFormat) -> list[float]:
    """Return all finite values of a format in ascending order, for a scale of 1. The elements must not share
    bits."""
    count = 2 ** int(number_format.bits)
    storage = number_format.storage_dtype
    if storage.is_floating_point:
        codes = torch.arange(count).to(torch.uint8).view(storage)
    else:
        codes = torch.arange(count).sub(count // 2 if storage.is_signed else 0).to(storage)
    values = number_format.decode(codes).float()
    return sorted(set(values[values.isfinite()].tolist()))


def _example() -> NumberFormat:
    """Return the codebook format of the example distribution, which need not be installed."""
    path = ROOT / "examples/acme_quant/src/acme_quant/codebook.py"
    spec = importlib.util.spec_from_file_location("codebook", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ACME_NF3  # type: ignore[no-any-return]


def number_lines() -> Drawing:
    """Draw each format's values on a line, to show where the steps are fine and where they are coarse."""
    names = ["int2", "int3", "int4", "fp4", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3"]
    rows = [("acme_nf3", _example()), *((name, formats().load_format(name)) for name in names)]
    drawing = Drawing(_WIDTH, 46 + 44 * len(rows))
    middle, half = (_LEFT + _WIDTH - 20) / 2, (_WIDTH - 20 - _LEFT) / 2
    for number, (name, number_format) in enumerate(rows):
        y = 44 + 44 * number
        values = values_of(number_format)
        largest = max(map(abs, values))
        drawing.text(_LEFT - 18, y + 1, name, 13, anchor="end", bold=True)
        drawing.text(_LEFT - 18, y + 15, f"{len(values)} values, {values[0]:g} … {values[-1]:g}".replace("-", "−"), 10, GREY, anchor="end")
        drawing.line(middle - half, y, middle + half, y, opacity=0.35)
        for value in values:
            x = middle + half * value / largest
            drawing.line(x, y - 12, x, y + 12, BLUE if value else ORANGE, 2 if len(values) < 20 else 0.8)
    drawing.text(middle, 20, "0", 12, GREY, anchor="middle")
    drawing.text(middle - half, 20, "− largest", 12, GREY)
    drawing.text(middle + half, 20, "largest", 12, GREY, anchor="end")
    return drawing


def dynamic_range() -> Drawing:
    """Draw each format's positive values on a logarithmic scale, which shows the range and the number of
    values per doubling."""
    names = ["int4", "int8", "fp4", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2", "fp8_e5m3"]
    lowest, highest = -18, 18
    drawing = Drawing(_WIDTH, 60 + 40 * len(names))
    left, step = _LEFT, (_WIDTH - 20 - _LEFT) / (highest - lowest)
    for exponent in range(lowest, highest + 1, 4):
        x = left + step * (exponent - lowest)
        drawing.line(x, 34, x, 48 + 40 * len(names), opacity=0.15)
        drawing.text(x, 24, f"2{_superscript(exponent)}", 12, GREY, anchor="middle")
    for number, name in enumerate(names):
        y = 58 + 40 * number
        values = torch.tensor([value for value in values_of(formats().load_format(name)) if value > 0], dtype=torch.float64)
        places = (values.log2() - lowest) * step + left
        drawing.text(left - 18, y + 4, name, 13, anchor="end", bold=True)
        drawing.line(float(places[0]), y, float(places[-1]), y, BLUE, 1, 0.4)
        for x in places.tolist():
            drawing.line(x, y - 10, x, y + 10, BLUE, 0.9 if len(values) > 20 else 2)
    return drawing


def _superscript(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def bit_fields() -> Drawing:
    """Draw sign, exponent and mantissa of the small floating-point formats."""
    small_floats: list[tuple[str, Any]] = [
        (name, number_format.shape)
        for name in formats().names()
        if hasattr(number_format := formats().load_format(name), "shape") and hasattr(number_format.shape, "exponent_bits")
    ]
    drawing = Drawing(_WIDTH, 36 + 34 * len(small_floats))
    for x, (text, color) in zip(
        (_LEFT, _LEFT + 110, _LEFT + 230), (("sign", ORANGE), ("exponent", BLUE), ("mantissa", GREEN)), strict=True
    ):
        drawing.box(x, 8, 14, 14, color, 0.3)
        drawing.text(x + 20, 20, text, 12)
    for number, (name, shape) in enumerate(small_floats):
        y, x = 36 + 34 * number, float(_LEFT)
        drawing.text(_LEFT - 18, y + 17, name, 13, anchor="end", bold=True)
        for count, color in ((int(shape.signed), ORANGE), (shape.exponent_bits, BLUE), (shape.mantissa_bits, GREEN)):
            for _ in range(count):
                drawing.box(x, y, 30, 24, color, 0.3, 2)
                x += 32
        values = [value for value in values_of(formats().load_format(name)) if value > 0]
        drawing.text(x + 12, y + 17, f"smallest {values[0]:.3g}, largest {values[-1]:g}", 12, GREY)
    return drawing


def bits_per_weight() -> Drawing:
    """Draw the number of bits that a weight takes in each scheme: the bits of the code, and a share of the
    scales and zero points."""
    rows = sorted(kind_report(catalog(), "schemes")["schemes"], key=lambda row: (row["effective_bits"], row["name"]))
    drawing = Drawing(_WIDTH, 40 + 20 * len(rows))
    left, unit = 190, (_WIDTH - 300) / 10
    drawing.box(left, 8, 14, 12, BLUE, 0.5, 2)
    drawing.text(left + 20, 18, "element", 12)
    drawing.box(left + 100, 8, 14, 12, ORANGE, 0.6, 2)
    drawing.text(left + 120, 18, "its share of scales and zero points", 12)
    for number, row in enumerate(rows):
        y, bits = 34 + 20 * number, row["effective_bits"]
        element = min(formats().get(level.partition("/")[0]).bits for level in row["weight"].split(" + "))
        drawing.text(left - 12, y + 11, row["name"], 12, anchor="end")
        drawing.box(left, y, unit * element, 13, BLUE, 0.5, 2)
        if bits > element:
            drawing.box(left + unit * element, y, unit * (bits - element), 13, ORANGE, 0.6, 2)
        drawing.text(left + unit * bits + 8, y + 11, f"{bits:.4g}", 11, GREY)
    return drawing
