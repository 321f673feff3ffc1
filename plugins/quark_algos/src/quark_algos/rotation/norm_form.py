"""What the norms of a model compute, found by trying: whether they subtract the mean, and whether they multiply by ``1 + weight``."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.errors import UnsupportedError

__all__ = ["TOLERANCE", "form_of", "with_form_of"]

TOLERANCE = 0.05
"""Relative to the largest output: norms in bfloat16 round three times, to 2⁻⁹ each; and forms that are told apart differ by far more."""


def with_form_of(facts: Architecture, norms: Iterable[tuple[str, nn.Module]], width: int) -> Architecture:
    """Facts that say what these norms compute.

    Args:
        facts: About the family, which do not.
        norms: The norms on its residual stream, with their names.
        width: Of the stream.

    Raises:
        UnsupportedError: One is neither a LayerNorm nor an RMSNorm, or they are not all of one form.
    """
    forms: dict[tuple[bool, bool], str] = {}
    for name, norm in norms:
        found = form_of(norm, width)
        if found is None:
            raise UnsupportedError(
                f"'{name}' ({type(norm).__name__}) computes neither what a LayerNorm does nor an RMSNorm, so no rotation commutes with it; "
                "leave rotation out"
            )
        forms.setdefault(found, name)
    if len(forms) > 1:
        raise UnsupportedError(f"{' and '.join(forms.values())} are norms of different forms: one rotation cannot suit both; leave it out")
    ((subtracts_mean, unit_offset),) = forms
    return attrs.evolve(facts, norm_subtracts_mean=subtracts_mean, norm_has_unit_offset=unit_offset)


@torch.no_grad()
def form_of(norm: nn.Module, width: int) -> tuple[bool, bool] | None:
    """Whether a norm subtracts the mean, and whether it has a unit offset; None where it is no such norm.

    Args:
        norm: Takes ``[…, width]``; a weight and a bias, where it has them, are ``[width]``.
        width: Of what it norms.
    """
    weight, bias = (p if isinstance(p := getattr(norm, name, None), nn.Parameter) else None for name in ("weight", "bias"))
    if any(p is not None and p.shape != (width,) for p in (weight, bias)):
        return None
    like = next((p for p in (weight, bias) if p is not None), torch.empty(0))
    # Large beside any epsilon, and with a mean that is not small beside the deviation.
    x = 32 * (1 + torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(like.device))
    found = norm(x.to(like.dtype))
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return None
    found = found.float() - (0 if bias is None else bias.float())
    for subtracts_mean in (False, True):
        centred = x - x.mean(-1, keepdim=True) if subtracts_mean else x
        plain = centred / centred.square().mean(-1, keepdim=True).sqrt()
        for unit_offset in (False, True) if weight is not None else (False,):
            expected = plain if weight is None else plain * (weight.float() + unit_offset)
            if bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max()):
                return subtracts_mean, unit_offset
    return None
