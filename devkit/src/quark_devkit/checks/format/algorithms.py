"""Checks that a format works with algorithms that choose codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quark.config.algorithm import AlgoConfig
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import QuarkError
from quark.numbers import WeightGrid
from quark.plugins import algorithms
from quark.runs import ModelQuantizer
from quark_devkit.check import check, require
from quark_devkit.checks.format.cases import Case, scaled_weight_cases
from quark_devkit.example_specs import SHAPE
from quark_devkit.subject import Subject
from quark_tiny_model import tiny_template

_FLOAT32_ERROR = 1e-6
"""Relative error of the float32 arithmetic of algorithms; the rounding error of a format of many bits is
smaller."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.down_proj = nn.Linear(SHAPE[1], SHAPE[0], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp.down_proj(x)  # type: ignore[operator]
        return y


class _Model(nn.Module):
    """A linear layer with a name of the tiny model, so that algorithms have settings for it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([_Block()])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model.layers[0](x)  # type: ignore[operator,index]
        return y


def _roundings(subject: Subject) -> Iterator[tuple[str, AlgoConfig]]:
    """Yield the name of each registered rounding, with its settings for the tiny model's family."""
    registered, scheme = subject.catalog.algorithms, next(iter(subject.catalog.schemes.names()), "")
    for name in registered.names():
        record = registered.get(name)
        if record.kind != "rounding" or record.processor is None:
            continue
        try:
            settings = tiny_template().get_config(scheme, algorithm=name).algo_config
        except QuarkError:
            continue
        for one in settings or ():
            yield name, one


@check("format", each=scaled_weight_cases)
def serves_columns(case: Case) -> None:
    """`quark.numbers.WeightGrid` rounds column by column, or vector by vector, to the values of
    round-to-nearest.
    """
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    transposed = weight.t().contiguous()
    grid = WeightGrid([case.quantizer], [SHAPE[0]], transposed)
    scales = grid.with_subscales(transposed, grid.fixed if grid.fixed is not None else grid.scales(transposed))
    by_column = transposed.clone()
    round_column = grid.rounder(scales)
    for k in range(0, grid.columns, grid.vector):
        round_column(by_column[k] if grid.vector == 1 else by_column[k : k + grid.vector], k)
    same = torch.allclose(by_column.t(), case.quantizer.fake_quantize(weight), rtol=1e-6, atol=0)
    require(same, "rounds column by column to different values than as a whole")


@check("format")
def is_rounded_by_every_algorithm(subject: Subject) -> None:
    """In every granularity, each registered rounding gives weights that the format represents exactly. The
    error is close to the error of round-to-nearest. For formats of vectors, this holds only for roundings
    with ``rounds_vectors``.
    """
    by_kind = {type(case.quantizer.granularity): case for case in scaled_weight_cases(subject)}
    for name, settings in _roundings(subject):
        if next(iter(by_kind.values())).format.vector > 1 and not getattr(
            algorithms().load_processor(name)(settings), "rounds_vectors", False
        ):
            continue
        for case in by_kind.values():
            torch.manual_seed(0)
            model, data = _Model(), [torch.randn(2, 32, SHAPE[1]) for _ in range(2)]
            weight = model.get_parameter("model.layers.0.mlp.down_proj.weight").detach().clone()
            config = QConfig(global_quant_config=QLayerConfig(weight=case.example.spec), algo_config=[settings])
            layer: Any = ModelQuantizer(config).quantize_model(model, data).get_submodule("model.layers.0.mlp.down_proj")
            quantizer, qparams, rounded = case.quantizer, layer.weight_quantizer.qparams, layer.weight.detach()
            exported = quantizer.dequantize(quantizer.codes_of(rounded, qparams), qparams)
            require(torch.equal(exported, rounded), f"has values without codes after {name} ({case})")
            error = float((rounded - weight).norm())
            nearest = float((quantizer.fake_quantize(weight) - weight).norm())
            least = _FLOAT32_ERROR * float(weight.norm())
            wrong = f"has, after {name}, an error of {error:.3g}; round-to-nearest has {nearest:.3g} ({case})"
            require(error <= 3 * nearest + least, wrong)
