"""Functions that fold scales into a mapping: a smooth layer is divided, and its balance layers are
multiplied.

Afterwards, the smooth layer returns ``y / s`` instead of ``y``, and the balance layers have the weights ``W ·
diag(s)`` instead of ``W``. So the output of the block does not change. Parameters are replaced by new
parameters and are never changed in place, because a parameter may be memory-mapped from a checkpoint or
shared with another module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import attrs
import torch
from torch import Tensor, nn

from quark_algos.mappings.resolve import ResolvedMapping, input_axis

__all__ = ["SavedParameters", "allowed", "fold", "holds", "probe"]

_PROBED = (0.25, 0.5, 2.0, 4.0)
"""The scales that `probe` can return. They are powers of two, because products with these are exact."""
_ULPS = 4
"""Tolerance of `allowed`, in units in the last place. It is needed because sums may have another order."""
_ULPS_OF_OFFSETS = 16
"""The tolerance for norms that multiply by ``1 + weight``. The factors of their balance layers are not powers
of two, so products are rounded, too.
"""


@torch.no_grad()
def fold(modules: ResolvedMapping, s: Tensor) -> Tensor:
    """Divide the output channels of the smooth layer by ``s``, and multiply the input channels of the balance
    layers by ``s``.

    New weights are computed in float32, or in float64 if a weight or ``s`` is float64. They are stored in the
    dtype of the old weights, so the new weight of a norm is rounded. For this reason, the balance layers are
    not multiplied by ``s``, but by the old weight of the norm divided by its new, rounded weight. Then only
    the rounding of the balance layers' weights can change the output. This matters most for norms that
    multiply by ``1 + weight``. If a weight is close to -1, a dtype of 16 bits stores the sum ``1 + weight``
    with low relative precision.

    Args:
        modules: A mapping in one block, from `quark_algos.mappings.resolve.resolve`.
        s: Scales above 0, ``[C]``. C is the number of output channels of the smooth layer
            (`ResolvedMapping.channels`).

    Returns: The scales by which the smooth layer was really divided, ``[C]``, in the dtype of the
    computation. They differ from ``s`` because the new weight is rounded. The inputs of the balance layers
    and the statistics of these inputs are divided by the returned scales.

    Raises:
        ValueError: ``s`` has another shape, or a value that is not finite or not above 0.
    """
    if s.shape != (modules.channels.count,):
        raise ValueError(
            f"{modules.name}: the scales have the shape {tuple(s.shape)}, not ({modules.channels.count},). Give one per channel"
        )
    if not bool((torch.isfinite(s) & (s > 0)).all()):
        raise ValueError(f"{modules.name}: scales must be finite and above 0. Skip the mapping, or use 1 for channels without statistics")
    weight = modules.smooth_layer.get_parameter("weight")
    s = s.to(device=weight.device, dtype=_master(weight, s))
    if weight.ndim == 1:
        s = _divide_norm(modules, weight, s)
    else:
        _divide_rows(modules, weight, s)
    columns = modules.channels.expand_scale(s)
    for module in modules.balance_layers.values():
        old = module.get_parameter("weight")
        factor = columns.to(old.device)
        product = old.to(_master(old, s)) * (factor if input_axis(module) == 1 else factor[:, None])
        _replace(module, "weight", product)
    return s


def _divide_norm(modules: ResolvedMapping, weight: nn.Parameter, s: Tensor) -> Tensor:
    """Divide the weight and the bias of a norm by ``s``.

    Return the old weight divided by the new weight, after the new weight has been rounded to its dtype.
    """
    offset = 1.0 if modules.unit_offset else 0.0
    old = weight.to(s.dtype) + offset
    divided = (old / s - offset).to(weight.dtype)
    new = divided.to(s.dtype) + offset
    is_sound = (new / old > 0) & torch.isfinite(new)
    # A channel that is always 0 can have any scale. If the weight of a channel would become 0 or not finite,
    # it is not changed.
    real = torch.where(old == 0, s, torch.where(is_sound, old / new, torch.ones_like(s)))
    _replace(modules.smooth_layer, "weight", torch.where((old == 0) | is_sound, divided.to(s.dtype), weight.to(s.dtype)))
    bias = getattr(modules.smooth_layer, "bias", None)
    if bias is not None:
        _replace(modules.smooth_layer, "bias", bias.to(s.dtype) / real)
    return real


def _divide_rows(modules: ResolvedMapping, weight: nn.Parameter, s: Tensor) -> None:
    outputs = weight.shape[1 - input_axis(modules.smooth_layer)]
    if modules.rows is None:
        factor = 1 / s
    else:
        factor = torch.ones(outputs, dtype=s.dtype, device=s.device)
        factor[modules.rows.to(s.device)] = 1 / s
    _replace(modules.smooth_layer, "weight", weight.to(s.dtype) * (factor[:, None] if input_axis(modules.smooth_layer) == 1 else factor))
    bias = getattr(modules.smooth_layer, "bias", None)
    if bias is not None:
        _replace(modules.smooth_layer, "bias", bias.to(s.dtype) * factor)


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    old = module.get_parameter(name)
    setattr(module, name, nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad))


def _master(one: Tensor, other: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (one.dtype, other.dtype) else torch.float32


@attrs.frozen(eq=False)
class SavedParameters:
    """The parameters of a mapping before scales are folded in. They can be restored later.

    Attributes:
        parameters: Triples of module, parameter name and parameter.
    """

    parameters: tuple[tuple[nn.Module, str, nn.Parameter], ...]

    @classmethod
    def of(cls, modules: ResolvedMapping) -> Self:
        """Return the current parameters of a mapping. Only references are stored, so nothing is copied."""
        names = [(modules.smooth_layer, "weight"), *((layer, "weight") for layer in modules.balance_layers.values())]
        if getattr(modules.smooth_layer, "bias", None) is not None:
            names.append((modules.smooth_layer, "bias"))
        return cls(tuple((module, name, module.get_parameter(name)) for module, name in names))

    def restore(self) -> None:
        """Put the saved parameters back into their modules. They are the same objects, so all values have the
        same bits as before.
        """
        for module, name, parameter in self.parameters:
            setattr(module, name, parameter)


def probe(modules: ResolvedMapping) -> Tensor:
    """Return scales with which a mapping can be tested, ``[C]``, float32.

    They are random powers of two with a fixed seed. Products with powers of two are exact. So if the mapping
    is valid, the output of the block can change only because sums are computed in another order.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(_PROBED), (modules.channels.count,), generator=generator)
    return torch.tensor(_PROBED, dtype=torch.float32)[drawn]


@torch.no_grad()
def holds(modules: ResolvedMapping, s: Tensor, run: Callable[[], Tensor], before: Tensor | None = None) -> float:
    """Return how much the output of a block changes if scales are folded into a mapping.

    The parameters are restored afterwards.

    The facts of an architecture describe the usual variant of a model family. Other variants exist: StableLM
    in its parallel form, Falcon with separate norms, OPT with norms after the residual or with another
    activation. In such a variant, folding may change the block's output, and the mapping must be skipped. Use
    the scales of `probe` to test this.

    Args:
        modules: A mapping in one block.
        s: Scales, ``[C]``.
        run: A function that computes the block's output, ``[…, channels]``. Every call must use the same
            input.
        before: The block's output before scales are folded in. If it is None, it is computed with ``run``.

    Returns: The largest relative change of a token, ``max over tokens ‖after − before‖ / ‖before‖``. It is
    infinite if the new output is not finite. Compare it with the result of `allowed`.
    """
    before, kept = (run() if before is None else before).double(), SavedParameters.of(modules)
    try:
        fold(modules, s)
        after = run().double()
    finally:
        kept.restore()
    size = before.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    worst = float(((after - before).norm(dim=-1) / size).max())
    return worst if worst == worst else float("inf")


def allowed(modules: ResolvedMapping, dtype: torch.dtype) -> float:
    """Return the largest value of `holds` that rounding errors alone can cause if the scales come from
    `probe`.

    Sums that are computed in another order differ by a few units in the last place. If a norm multiplies by
    ``1 + weight``, the factors of the balance layers are not powers of two, so every product is rounded, too.

    Args:
        modules: The mapping.
        dtype: The dtype of the block's computations.
    """
    return (_ULPS_OF_OFFSETS if modules.unit_offset else _ULPS) * torch.finfo(dtype).eps
