"""Rounding tasks without a run: a few layers, statistics of their input, and held-out tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import HeldOut, Rounding, RoundingTask, Statistic, float_weight
from quark.config.layer import QLayerConfig, levels
from quark.models.layers import QuantizedLayer, quantized_class
from quark.numbers.on_grid import grid_error
from quark_devkit.algorithm_runs import processor_of
from quark_devkit.check import assume, require
from quark_devkit.small_models import fitting, has_vectors
from quark_devkit.statistic_laws import COLUMNS, Inputs, inputs
from quark_devkit.subject import Subject

ROWS = 32


def layers_of(
    config: QLayerConfig, count: int = 2, rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = torch.float32
) -> dict[str, QuantizedLayer]:
    """Return layers to round, by name.

    The layers have biases. Their weights are the same at every call.
    """
    found = {}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        layer = nn.utils.skip_init(nn.Linear, columns, rows, dtype=dtype)  # skip_init draws no random number
        with torch.no_grad():
            layer.weight.copy_(torch.randn(rows, columns, generator=generator, dtype=torch.float32) * columns**-0.5)
            layer.bias.copy_(torch.randn(rows, generator=generator, dtype=torch.float32))
        found[f"blocks.0.layer_{number}"] = quantized_class(layer).from_float(layer.requires_grad_(False), config)
    return found


def statistics(rounding: Rounding, parts: Sequence[Inputs], columns: int = COLUMNS) -> dict[type[Statistic], Statistic]:
    """Return the statistics of a rounding's ``needs``, merged from several parts."""
    merged = {kind: kind(columns, torch.device("cpu")) for kind in rounding.needs}
    for kind, whole in merged.items():
        for i, part in enumerate(parts):
            own = whole if i == 0 else kind(columns, torch.device("cpu"))
            own.update(part.x.clone(), part.reference.clone() if kind.wants_float else None)
            if i:
                whole.merge(own)
    return merged


def rounded(
    rounding: Rounding,
    layers: Mapping[str, QuantizedLayer],
    data: Inputs | None = None,
    held_out: Inputs | None = None,
    given: Mapping[type[Statistic], Statistic] | None = None,
) -> Mapping[str, Mapping[str, object]]:
    """Round the layers and return the rounding's metrics by layer.

    Args:
        rounding: The rounding.
        layers: Layers to change.
        data: Inputs of the layers; None for the inputs that `inputs` returns.
        held_out: Tokens for validation; None for a rounding without validation.
        given: Statistics to use instead of the statistics of ``data``.
    """
    columns = int(float_weight(next(iter(layers.values()))).shape[1])
    made = statistics(rounding, [inputs(0, columns=columns) if data is None else data], columns) if given is None else given
    validation = None if held_out is None else HeldOut(held_out.x, held_out.reference)
    has_table = any(layer.weight_quantizer.quantizer.stored_level.format.table_shape is not None for layer in layers.values())  # type: ignore[union-attr]
    tasks = [{name: layer} for name, layer in layers.items()] if has_table else [layers]  # one task for each layer, as in runs
    return {name: one for task in tasks for name, one in rounding.round(RoundingTask(task, made, held_out=validation)).items()}


def require_on_grid(layers: Iterable[QuantizedLayer], where: str = "") -> None:
    """Require that rounded layers have scales, and that each weight is on the grid of its scales.

    Args:
        layers: The layers.
        where: Where the layers come from, in parentheses, for the message.
    """
    for layer in layers:
        module = layer.weight_quantizer
        assert module is not None
        has_scales = module.qparams is not None or module.quantizer.is_float
        wrong = grid_error(module.quantizer, module.qparams, float_weight(layer)) if has_scales else "has no scales"
        require(wrong is None, f"leaves a weight that {wrong}{where}")


def schemes_to_round(subject: Subject) -> dict[str, QLayerConfig]:
    """Return the registered schemes that quantize weights, except those in ``excluded_schemes``.

    Raises:
        NotApplicableError: There is no such scheme.
    """
    found = {name: config for name, config in fitting([(ROWS, COLUMNS)]).items() if name not in subject.record.excluded_schemes}
    if not processor_of(subject).rounds_vectors:  # a run refuses schemes of vectors
        found = {name: config for name, config in found.items() if not has_vectors(config)}
    assume(found, "it fits no scheme")
    return found


@attrs.frozen(eq=False)
class Case:
    """A rounding with a scheme.

    Attributes:
        subject: The rounding.
        name: Name of the scheme.
        config: The scheme.
    """

    subject: Subject
    name: str
    config: QLayerConfig

    def __str__(self) -> str:
        return self.name

    def rounding(self) -> Rounding:
        """Return a new object of the rounding."""
        rounding: Rounding = processor_of(self.subject)
        return rounding

    def rounded(self, **sizes: Any) -> list[tuple[Any, Any]]:
        """Return rounded layers, each with its float layer. The keyword arguments are those of
        `layers_of`."""
        layers = layers_of(self.config, **sizes)
        rounded(self.rounding(), layers, held_out=inputs(1, 32))
        return list(zip(layers.values(), layers_of(self.config, **sizes).values(), strict=True))


def cases(subject: Subject) -> list[Case]:
    """Return one case for each combination of granularity, symmetry and scale formats over the levels of a
    weight."""
    found: dict[object, Case] = {}
    for name, config in schemes_to_round(subject).items():
        kind = tuple((s.qscheme, s.symmetric, s.scale_format, s.is_scale_quant) for s in levels(config.weight))
        found.setdefault(kind, Case(subject, name, config))
    return list(found.values())


def one_case(subject: Subject) -> list[Case]:
    """Return only the first case."""
    return cases(subject)[:1]


def mean_square_of(layers: Mapping[str, QuantizedLayer], weights: Iterable[Tensor], data: Inputs) -> Tensor:
    """Return the squared error of the outputs for each token, summed over the layers, with shape
    ``[tokens]``."""
    held_out = HeldOut(data.x, data.reference)
    pairs = zip(layers.values(), weights, strict=True)
    return torch.stack([held_out.squared_error(layer.weight.detach(), held_out.outputs(w)) for layer, w in pairs]).sum(0)  # type: ignore[operator]
