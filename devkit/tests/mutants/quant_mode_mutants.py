"""Quantization modes with one thing wrong each."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from itertools import count
from threading import Lock
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.base.lazy import ObjectRef
from quark.config.model import QConfig
from quark.plugins import QuantModeRecord

from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


def plan(model: nn.Module, config: QConfig) -> str:
    return "8 bits"


def rounding_plan(model: nn.Module, config: QConfig) -> str:
    return str(quantize(model, config).quark_plan)


def no_plan(model: nn.Module, config: QConfig) -> None:
    return None


def quantize(model: nn.Module, config: QConfig, data: Any = None, codes: int = 127) -> Any:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if any(fnmatch(name.rpartition(".")[0], pattern) for pattern in config.exclude):
                continue
            scale = p.abs().max() / codes
            p.copy_((p / scale).round() * scale)
    return described(model, config)


def described(model: nn.Module, config: QConfig, data: Any = None) -> Any:
    model.quant_config, model.quark_plan, model.quark_quantized = config, "8 bits", True  # type: ignore[assignment]
    return model


def silent(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    quantized = quantize(model, config)
    del quantized.quark_plan
    return quantized  # type: ignore[no-any-return]


def in_one_bit(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    return quantize(model, config, codes=1)  # type: ignore[no-any-return]


def of_everything(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    return quantize(model, attrs.evolve(config, exclude=[]))  # type: ignore[no-any-return]


def renaming(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    config.exclude.append("*.head")
    return quantize(model, config)  # type: ignore[no-any-return]


def using_data_up(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    for x in data:
        x.zero_()
    return quantize(model, config)  # type: ignore[no-any-return]


def in_training_mode(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    return quantize(model, config).train()  # type: ignore[no-any-return]


def locked(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    quantized = quantize(model, config)
    quantized.lock = Lock()
    return quantized  # type: ignore[no-any-return]


class OfFourRows(nn.Module):
    """Takes inputs of four rows, as in calibration."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x.view(4, -1))
        return y


class Widening(OfFourRows):
    """Rounds inputs with the largest scale that it has seen."""

    top = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.top = max(self.top, float(x.abs().max()))
        y: Tensor = self.model((x * 127 / self.top).round() * self.top / 127)
        return y


def in_four_rows(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    return described(OfFourRows(quantize(model, config)).eval(), config)  # type: ignore[no-any-return]


def widening(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    return described(Widening(quantize(model, config)).eval(), config)  # type: ignore[no-any-return]


def giving_up(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    return (described if config.exclude else quantize)(model, config)  # type: ignore[no-any-return]


SEEDS = count()


def noisy(model: nn.Module, config: QConfig, data: Any = None) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-4 * torch.rand((), generator=torch.Generator().manual_seed(next(SEEDS))))
    return quantize(model, config)  # type: ignore[no-any-return]


def mutant(check: str, about: str, plan_of: Callable[..., Any] = plan, quantize_of: Callable[..., Any] = quantize) -> Mutant:
    return Mutant(f"quant_mode:{check}", about, (record(plan_of, quantize_of),))


def record(plan_of: Callable[..., Any] = plan, quantize_of: Callable[..., Any] = quantize) -> QuantModeRecord:
    return QuantModeRecord(name="mutant_mode", plan=ObjectRef(plan_of), quantize=ObjectRef(quantize_of))


HEALTHY = (record(),)
MUTANTS = [
    mutant("plans_without_a_change", "rounds the model that it plans", rounding_plan),
    mutant("plans_without_a_change", "returns no plan", no_plan),
    mutant("gives_a_quantized_model", "returns a model without its plan", quantize_of=silent),
    mutant("gives_a_quantized_model", "rounds nothing", quantize_of=described),
    mutant("leaves_what_it_is_given", "excludes one more pattern", quantize_of=renaming),
    mutant("leaves_what_it_is_given", "writes into the data", quantize_of=using_data_up),
    mutant("leaves_what_it_is_given", "leaves training mode on", quantize_of=in_training_mode),
    mutant("keeps_excluded_layers_float", "rounds every layer", quantize_of=of_everything),
    mutant("keeps_excluded_layers_float", "leaves all layers float then", quantize_of=giving_up),
    mutant("computes_for_any_batch", "takes inputs of four rows alone", quantize_of=in_four_rows),
    mutant("computes_for_any_batch", "goes on measuring inputs", quantize_of=widening),
    mutant("is_copied", "holds a lock", quantize_of=locked),
    mutant("is_near_the_float_model", "rounds to one bit", quantize_of=in_one_bit),
    mutant("repeats_itself", "adds noise of another seed each time", quantize_of=noisy),
]
