"""A small float64 model after transforms but without rounding, whose outputs can be compared with the outputs
before the transforms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import Metrics, Rounding, RoundingTask
from quark.calibration.report import CalibrationReport
from quark.config.algorithm import AlgoConfig
from quark.config.layer import QLayerConfig
from quark.runs.quantize_block import quantize_blocks
from quark.runs.run import plan_run
from quark.runs.sink import BlockSink
from quark.runs.started_run import StartedRun, start_transforms
from quark_devkit.small_models import InFloat64, batches, run_config, small_model
from quark_devkit.whole_runs import is_same

__all__ = ["TransformedModel", "changed_parts", "different_parameters", "distance", "float64_logits", "named_parts", "transformed"]

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


_DEAD = 3
"""Channels that are always 0 in models with dead channels."""


@attrs.frozen(eq=False)
class TransformedModel:
    """A model after the transforms of a run.

    Attributes:
        model: The float64 model with float layers.
        before: The model before the transforms.
        report: The calibration report of the run.
        settings: The settings, resolved for this model.
    """

    model: nn.Module
    before: nn.Module
    report: CalibrationReport
    settings: Sequence[AlgoConfig]

    @property
    def changed(self) -> list[str]:
        """Names of parameters that differ between the two models or that only one of them has."""
        return different_parameters(self.before, self.model)


class _LeaveFloat(Rounding):
    """A rounding that does not change weights."""

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        return {}


class _Discard(BlockSink):
    """A sink that drops quantized layers, so that the model keeps its float layers."""

    def accept(self, layers: Mapping[str, Any]) -> None:
        """Drop the quantized layers."""


def transformed(
    scheme: str | QLayerConfig,
    *settings: AlgoConfig,
    exclude: tuple[str, ...] = (),
    is_fused: bool = False,
    has_dead_channels: bool = False,
) -> TransformedModel:
    """Return the small model after a run with a scheme and the transforms that ``settings`` describe.

    Transforms are not validated, since a validation could leave out a transform.

    Args:
        scheme: Name of a scheme, or a configuration of layers.
        *settings: Settings of the transforms.
        exclude: Patterns of layers that stay float.
        is_fused: Whether to use the variant with fused projections.
        has_dead_channels: Whether the first values of attention, and the first outputs of ``up_proj``, are 0.
    """
    model, before = (_with_biases(is_fused) for _ in range(2))
    for one in (model, before) if has_dead_channels else ():
        for name, parameter in one.named_parameters():
            if name.rpartition(".")[0].endswith((".v_proj", ".up_proj")):
                parameter.data[:_DEAD] = 0
    data = batches()
    run = plan_run(model, run_config(scheme, *settings, exclude=exclude)).with_data(model, data, torch.device("cpu"))
    transforms = start_transforms(model, run.plan, run.algorithms)
    leaving = attrs.evolve(run, algorithms=attrs.evolve(run.algorithms, rounding=_LeaveFloat(), rounding_name=None))
    report = quantize_blocks(StartedRun(leaving, model, transforms=transforms), _Discard())
    return TransformedModel(model, before, report, tuple(run.plan.config.algo_config or ()))


def _with_biases(is_fused: bool) -> nn.Module:
    """Return the small model in float64, with biases in its blocks even if models of the family have no
    biases."""
    model = small_model(torch.float64, is_fused=is_fused)
    generator = torch.Generator().manual_seed(1)
    layers: dict[str, Any] = {n: layer for n, layer in model.named_modules() if isinstance(layer, nn.Linear) and ".layers." in n}
    for layer in layers.values():
        if layer.bias is None:
            bias = torch.randn(len(layer.weight), generator=generator, dtype=torch.float64) * 0.1
            layer.bias = nn.Parameter(bias, requires_grad=False)
    return model


@torch.no_grad()
def float64_logits(model: nn.Module) -> Tensor:
    """Return the logits of a float64 model on tokens outside its calibration, in float64 throughout."""
    with InFloat64():
        return torch.cat([model(x).logits[0] for x in batches(3, seed=2)])


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between two tensors, relative to the largest value of ``other``."""
    return float((one - other).abs().max() / other.abs().max())


def different_parameters(one: nn.Module, other: nn.Module) -> list[str]:
    """Return the names of parameters that have different values in two models, or that one of them lacks."""
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    return [name for name in dict.fromkeys((*ours, *theirs)) if not is_same(ours.get(name), theirs.get(name))]


def named_parts(model: nn.Module) -> dict[str, list[str]]:
    """Return names of all modules, parameters, buffers and hooks.

    A tied parameter is listed under each of its names, and a module with hooks is listed once for each hook.
    The entry of a module says whether it is in training mode. The entry of a parameter says whether it
    requires gradients.
    """
    modes = {True: " in training mode", False: ""}
    gradients = {True: " that requires gradients", False: ""}
    return {
        "module": [f"{name} ({type(module).__name__}){modes[module.training]}" for name, module in model.named_modules()],
        "parameter": [
            f"{name} {list(p.shape)} {p.dtype}{gradients[p.requires_grad]}" for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "buffer": [f"{name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers()],
        "hook": [f"of '{name}' in {kind}" for name, module in model.named_modules() for kind in HOOKS for _ in getattr(module, kind) or ()],
    }


def changed_parts(before: nn.Module, after: nn.Module) -> list[str]:
    """Return the parts that only one of two models has, such as
    ``"adds the buffer factors [3] torch.float32"``.

    Each hook of a module is a separate part.
    """
    ours, theirs = named_parts(before), named_parts(after)
    return [
        f"{verb} the {kind} {name}"
        for kind in ours
        for verb, more, less in (("adds", theirs, ours), ("removes", ours, theirs))
        for name in Counter(more[kind]) - Counter(less[kind])
    ]
