"""Folding: a scale goes out of one operation and into those that read it, and the block computes what it did before.

``prev`` puts out ``y / s`` where it put out ``y``; the readers have ``W · diag(s)`` where they had ``W``. Parameters are made anew and
never written: they may be mapped from a checkpoint, or be another module's too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import attrs
import torch
from torch import Tensor, nn

from quark_algos.mappings.resolve import ResolvedMapping, input_axis

__all__ = ["Kept", "allowed", "fold", "holds", "probe", "unfold"]

_PROBED = (0.25, 0.5, 2.0, 4.0)
_ULPS = 4
_ULPS_OF_OFFSETS = 16


@torch.no_grad()
def fold(modules: ResolvedMapping, s: Tensor) -> Tensor:
    """Divide the outputs of ``prev`` by ``s``, and multiply what its readers take by the same.

    New weights are computed in float32, or float64 where they or ``s`` are, and kept in the dtype of the old. A norm's new weight is
    rounded by that; the readers are multiplied by what the norm was really divided by, so that their own rounding is the only difference.
    That matters most where a norm multiplies by ``1 + weight``: close to -1 a weight of 16 bits leaves few bits for the sum.

    Args:
        modules: Of one site, by `quark_algos.mappings.resolve.resolve`.
        s: Above 0, ``[C]``, one for each channel of ``prev`` (`ResolvedMapping.channels`).

    Returns:
        What the channels were really divided by, ``[C]``, in the dtype of the computation; statistics of the readers' inputs change by it.

    Raises:
        ValueError: ``s`` has another shape, or a value that is not finite or not above 0.
    """
    if s.shape != (modules.channels.count,):
        raise ValueError(f"{modules.name}: scales of shape {tuple(s.shape)} for {modules.channels.count} channels; give one for each")
    if not bool((torch.isfinite(s) & (s > 0)).all()):
        raise ValueError(f"{modules.name}: scales must be finite and above 0; leave the site out, or put 1 where nothing is known")
    weight = modules.prev.get_parameter("weight")
    s = s.to(device=weight.device, dtype=_master(weight, s))
    if weight.ndim == 1:
        s = _divide_norm(modules, weight, s)
    else:
        _divide_rows(modules, weight, s)
    columns = modules.channels.expand_scale(s)
    for module in modules.readers.values():
        old = module.get_parameter("weight")
        factor = columns.to(old.device)
        product = old.to(_master(old, s)) * (factor if input_axis(module) == 1 else factor[:, None])
        _replace(module, "weight", product)
    return s


def unfold(modules: ResolvedMapping, s: Tensor) -> Tensor:
    """`fold` of the reciprocals: what it undoes but for rounding. `Kept` undoes it exactly."""
    return fold(modules, 1 / s)


def _divide_norm(modules: ResolvedMapping, weight: nn.Parameter, s: Tensor) -> Tensor:
    """Divide a norm; returns what it was divided by, given the dtype of its weight."""
    offset = 1.0 if modules.unit_offset else 0.0
    old = weight.to(s.dtype) + offset
    wanted = (old / s - offset).to(weight.dtype)
    got = wanted.to(s.dtype) + offset
    is_sound = (got / old > 0) & torch.isfinite(got)
    # A channel that is always 0 may have any scale; one whose weight would become 0, or no number, stays as it is.
    real = torch.where(old == 0, s, torch.where(is_sound, old / got, torch.ones_like(s)))
    _replace(modules.prev, "weight", torch.where((old == 0) | is_sound, wanted.to(s.dtype), weight.to(s.dtype)))
    bias = getattr(modules.prev, "bias", None)
    if bias is not None:
        _replace(modules.prev, "bias", bias.to(s.dtype) / real)
    return real


def _divide_rows(modules: ResolvedMapping, weight: nn.Parameter, s: Tensor) -> None:
    outputs = weight.shape[1 - input_axis(modules.prev)]
    if modules.rows is None:
        factor = 1 / s
    else:
        factor = torch.ones(outputs, dtype=s.dtype, device=s.device)
        factor[modules.rows.to(s.device)] = 1 / s
    _replace(modules.prev, "weight", weight.to(s.dtype) * (factor[:, None] if input_axis(modules.prev) == 1 else factor))
    bias = getattr(modules.prev, "bias", None)
    if bias is not None:
        _replace(modules.prev, "bias", bias.to(s.dtype) * factor)


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    old = module.get_parameter(name)
    setattr(module, name, nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad))


def _master(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32


@attrs.frozen(eq=False)
class Kept:
    """The parameters that a fold replaces, to be put back as they were.

    Attributes:
        parameters: Module, name and parameter.
    """

    parameters: tuple[tuple[nn.Module, str, nn.Parameter], ...]

    @classmethod
    def of(cls, modules: ResolvedMapping) -> Self:
        """Those of a site as they are now; nothing is copied."""
        names = [(modules.prev, "weight"), *((reader, "weight") for reader in modules.readers.values())]
        if getattr(modules.prev, "bias", None) is not None:
            names.append((modules.prev, "bias"))
        return cls(tuple((module, name, module.get_parameter(name)) for module, name in names))

    def restore(self) -> None:
        """Put them back, bit by bit."""
        for module, name, parameter in self.parameters:
            setattr(module, name, parameter)


def probe(modules: ResolvedMapping) -> Tensor:
    """Scales to try a site with, ``[C]``, float32: random powers of two, the same each time.

    Powers of two go through products without rounding, so that where a site holds, results differ by the order of sums at most.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(_PROBED), (modules.channels.count,), generator=generator)
    return torch.tensor(_PROBED)[drawn]


@torch.no_grad()
def holds(modules: ResolvedMapping, s: Tensor, run: Callable[[], Tensor]) -> float:
    """How much a scale at a site changes what a block puts out; the modules are afterwards what they were.

    Facts are those of a family's usual variant. In others (StableLM's parallel form, Falcon's with norms of its own, OPT's with norms after
    the residual or another activation) a site may change the output, and must be left out. Try it with the scales of `probe`.

    Args:
        modules: Of one site.
        s: Scales, ``[C]``.
        run: Computes the block's output, ``[…, channels]``, always from the same input.

    Returns:
        The largest difference of a token, relative to its own norm: ``max over tokens ‖after − before‖ / ‖before‖``. It is to be compared
        with `allowed`. Infinite where the output is no longer finite.
    """
    before, kept = run().double(), Kept.of(modules)
    try:
        fold(modules, s)
        after = run().double()
    finally:
        kept.restore()
    size = before.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    worst = float(((after - before).norm(dim=-1) / size).max())
    return worst if worst == worst else float("inf")


def allowed(modules: ResolvedMapping, dtype: torch.dtype) -> float:
    """The largest result of `holds` with the scales of `probe` that rounding explains; ``dtype`` is the one the block computes in.

    Results of sums in another order differ by a few units in the last place. Where a norm multiplies by ``1 + weight``, its readers'
    columns are not multiplied by powers of two, and every product is rounded anew.
    """
    return (_ULPS_OF_OFFSETS if modules.unit_offset else _ULPS) * torch.finfo(dtype).eps
