"""The rules of runtimes' readers: ``rules.toml`` as values, and whether one fits a layer."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import attrs

from quark.config.layer import QLayerConfig, TensorSpec
from quark.numbers import canonicalize

__all__ = ["Rule", "Rules", "rule_for", "rules"]


@attrs.frozen
class Rule:
    """A rule of a runtime for layers of one kind.

    Attributes:
        layout: Name of the layout that it is for.
        method: The class of the runtime that computes such layers.
        weight, input: Patterns of the tensors: a table, a list of tables for as many levels, ``"none"`` for
            float, ``"any"``.
        on: Runtime → the kernels it chooses from, and what they need.
        refused: Runtime → why it has none.
        experts: Whether it is about the experts of a mixture, which runtimes compute as one layer, by methods
            of their own.
    """

    layout: str
    method: str
    weight: Any
    input: Any
    on: Mapping[str, str]
    refused: Mapping[str, str] = attrs.field(factory=dict)
    experts: bool = False


@attrs.frozen
class Rules:
    """The content of ``rules.toml``.

    Attributes:
        runtimes: Name → what it is.
        fused: Name of a fused layer → those of its parts.
        rules: In the order in which runtimes try them.
    """

    runtimes: Mapping[str, str]
    fused: Mapping[str, list[str]]
    rules: tuple[Rule, ...]


@cache
def rules() -> Rules:
    """Return all rules."""
    content = tomllib.loads((files(__package__) / "rules.toml").read_text(encoding="utf-8"))
    return Rules(content["runtimes"], content["fused"], tuple(Rule(**rule) for rule in content["rules"]))


def rule_for(layout: str, config: QLayerConfig, *, experts: bool = False) -> Rule | None:
    """Return the first rule that fits a layer in a layout, or an expert of a mixture.

    None where none does.
    """
    for rule in rules().rules:
        is_about = rule.layout == layout and rule.experts == experts
        if is_about and _fits(rule.weight, config.weight) and _fits(rule.input, config.input_tensors):
            return rule
    return None


def _fits(pattern: Any, spec: TensorSpec | None) -> bool:
    if pattern == "any":
        return True
    if spec is None or pattern == "none":
        return spec is None and pattern == "none"
    specs, tables = canonicalize(spec), pattern if isinstance(pattern, list) else [pattern]
    return len(specs) == len(tables) and all(
        _is_one_of(wanted, level.to_dict().get(key)) for level, table in zip(specs, tables, strict=True) for key, wanted in table.items()
    )


def _is_one_of(wanted: Any, value: Any) -> bool:
    if wanted == "positive":
        return isinstance(value, int) and value > 0
    value = list(value) if isinstance(value, tuple) else value
    return bool(value in wanted if isinstance(wanted, list) else value == wanted)
