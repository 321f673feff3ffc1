"""Fold a scale into the weights of a mapping: divide the smooth layer, multiply the balance layers.

The block's output stays.

The smooth layer returns ``y / s`` instead of ``y``; the balance layers have the weights ``W · diag(s)``
instead of ``W``. New parameters replace the old ones, which are never written to: they may be memory-mapped
from a checkpoint, or shared with another module.
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
"""Scales that `probe` draws from: powers of two, since products with them are exact."""
_ULPS = 4
"""Tolerance of `allowed` in units in the last place, for sums in another order."""
_ULPS_OF_OFFSETS = 16
"""The tolerance for norms with ``1 + weight``, whose balance layers get factors that are not powers of two:
products round too.
"""


@torch.no_grad()
def fold(modules: ResolvedMapping, s: Tensor) -> Tensor:
    """Divide the output channels of the smooth layer by ``s``.

    The input channels of the balance layers are multiplied by it.

    New weights are computed in float32, or in float64 if a weight or ``s`` is float64, and stored in the
    dtype of the old weights. Storing rounds a norm's new weight; the balance layers are therefore multiplied
    by old weight ÷ stored weight, not by ``s``, so that the only remaining difference is the rounding of
    their own weights. It matters most for norms that multiply by ``1 + weight``: for weights close to -1, 16
    bits leave few bits for the sum.

    Args:
        modules: A mapping in one block, from `quark_algos.mappings.resolve.resolve`.
        s: Scales above 0, ``[C]``, one per output channel of the smooth layer (`ResolvedMapping.channels`).

    Returns:
        The scales after rounding of the smooth layer, ``[C]``, in the dtype of the computation: the
        statistics of the balance layers' inputs change by these.

    Raises:
        ValueError: ``s`` has another shape, or a value that is not finite or not above 0.
    """
    if s.shape != (modules.channels.count,):
        raise ValueError(f"{modules.name}: scales of shape {tuple(s.shape)} for {modules.channels.count} channels; give one per channel")
    if not bool((torch.isfinite(s) & (s > 0)).all()):
        raise ValueError(f"{modules.name}: scales must be finite and above 0; skip the mapping, or use 1 for channels without statistics")
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
    """Divide weight and bias of a norm.

    Return old weight ÷ new weight, with the new weight rounded to its dtype.
    """
    offset = 1.0 if modules.unit_offset else 0.0
    old = weight.to(s.dtype) + offset
    divided = (old / s - offset).to(weight.dtype)
    new = divided.to(s.dtype) + offset
    is_sound = (new / old > 0) & torch.isfinite(new)
    # A channel that is always 0 can have any scale; a channel whose weight would become 0 or not finite keeps
    # its weight.
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
    """The parameters that a fold replaces, saved so that they can be restored.

    Attributes:
        parameters: Triples of module, parameter name and parameter.
    """

    parameters: tuple[tuple[nn.Module, str, nn.Parameter], ...]

    @classmethod
    def of(cls, modules: ResolvedMapping) -> Self:
        """Save the current parameters of a mapping by reference; nothing is copied."""
        names = [(modules.smooth_layer, "weight"), *((layer, "weight") for layer in modules.balance_layers.values())]
        if getattr(modules.smooth_layer, "bias", None) is not None:
            names.append((modules.smooth_layer, "bias"))
        return cls(tuple((module, name, module.get_parameter(name)) for module, name in names))

    def restore(self) -> None:
        """Set the saved parameters again; they are the same objects, so the values are bit-identical."""
        for module, name, parameter in self.parameters:
            setattr(module, name, parameter)


def probe(modules: ResolvedMapping) -> Tensor:
    """Return scales to test a mapping with, ``[C]``, float32: random powers of two from a fixed seed.

    Products with powers of two are exact, so that outputs of a valid mapping differ by the order of sums at
    most.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(_PROBED), (modules.channels.count,), generator=generator)
    return torch.tensor(_PROBED, dtype=torch.float32)[drawn]


@torch.no_grad()
def holds(modules: ResolvedMapping, s: Tensor, run: Callable[[], Tensor], before: Tensor | None = None) -> float:
    """Return how much the output of a block changes if a scale is folded into a mapping.

    The parameters are restored afterwards.

    The facts of an architecture describe the usual variant of a model family. In other variants (StableLM's
    parallel form, Falcon with separate norms, OPT with norms after the residual or another activation)
    folding may change the block's output, and the mapping must be skipped. Test it with the scales of
    `probe`.

    Args:
        modules: A mapping in one block.
        s: Scales, ``[C]``.
        run: Computes the block's output, ``[…, channels]``, always from the same input.
        before: That output before the change; computed if None.

    Returns:
        The largest change of a token relative to its norm: ``max over tokens ‖after − before‖ / ‖before‖``;
        infinite if the output is no longer finite. Compare it with `allowed`.
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
    """Return the largest result of `holds` that rounding errors explain, with the scales of `probe`.

    The block computes in ``dtype``.

    Sums in another order differ by a few units in the last place. For a norm that multiplies by
    ``1 + weight``, the factors of the balance layers are not powers of two, so that every product is rounded.
    """
    return (_ULPS_OF_OFFSETS if modules.unit_offset else _ULPS) * torch.finfo(dtype).eps
