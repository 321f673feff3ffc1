"""Operators of graphs with one thing wrong each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quark.base.lazy import ObjectRef
from quark.plugins import GraphOpRecord

from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


class Scaled(nn.Module):
    """A model that mish is multiplied in."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mish(x) * self.factor


class Stateful(Scaled):
    """A model that computes something else in its graph than outside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.compiler.is_exporting() else -super().forward(x)


def healthy(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    return Scaled().eval(), (torch.linspace(-3, 3, 24).reshape(2, 12),)


def other(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.Softplus().eval(), (torch.ones(2, 3),)


def stateful(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    return Stateful().eval(), healthy(name)[1]


def drawn(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    return Scaled().eval(), (torch.randn(2, 12),)


def record(example: Any = healthy, operators: tuple[str, ...] = ("aten::mish",), **facts: Any) -> GraphOpRecord:
    return GraphOpRecord(name="mutant_op", operators=operators, modules=("Mish",), example=ObjectRef(example), **facts)


def mutant(check: str, about: str, one: GraphOpRecord) -> Mutant:
    return Mutant(f"graph_op:{check}", about, (one,))


HEALTHY = (record(),)
MUTANTS = [
    mutant("names_operators_of_torch", "names an operator that does not exist", record(operators=("aten::mishmash",))),
    mutant("names_operators_of_torch", "names an operator that only writes", record(operators=("aten::mish_",))),
    mutant("names_arguments_of_its_operators", "names an argument of another operator", record(inputs=("query",))),
    mutant("names_a_layer_type", "names no layer type", record(weight="self", layer_type="mutant_layer")),
    mutant("is_in_its_example", "has an example of something else", record(other)),
    mutant("has_the_same_example_each_time", "draws numbers of the program", record(drawn)),
    mutant("moves_values_if_it_says_so", "says that it moves values, and computes new ones", record(moves_values=True)),
    mutant("is_quantized", "computes something else in a graph", record(stateful)),
]
