"""Measures the form of a model's norms by running them.

The form says whether they subtract the mean, and whether they multiply by ``1 + weight``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import attrs
import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.errors import UnsupportedError
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import text_config
from quark_algos.rotation.residual_stream import matching, norms_and_readers

__all__ = ["PROBE_SCALE", "TOLERANCE", "as_measured", "form_of", "with_form_of"]

TOLERANCE = 0.05
"""Tolerance relative to the largest output: norms in bfloat16 round three times, by 2⁻⁹ each; different forms
differ by far more.
"""

PROBE_SCALE = 32
"""Scale of the inputs that norms are run with."""


def with_form_of(facts: Architecture, norms: Iterable[tuple[str, nn.Module]], width: int) -> Architecture:
    """Return the architecture with the measured form of its norms.

    Args:
        facts: Architecture of the model, which lacks the form of the norms.
        norms: The norms on the residual stream, with their names.
        width: Channels of the stream.

    Raises:
        UnsupportedError: A norm is neither a LayerNorm nor an RMSNorm, or the norms have different forms.
    """
    forms: dict[tuple[bool, bool], str] = {}
    for name, norm in norms:
        form = form_of(norm, width)
        if form is None:
            raise UnsupportedError(
                f"'{name}' ({type(norm).__name__}) is neither a LayerNorm nor an RMSNorm, so no rotation commutes with it: leave rotation "
                f"out"
            )
        forms.setdefault(form, name)
    if len(forms) > 1:
        raise UnsupportedError(f"{' and '.join(forms.values())} have different forms, and one rotation cannot fit both: leave rotation out")
    ((subtracts_mean, unit_offset),) = forms
    return attrs.evolve(facts, norm_subtracts_mean=subtracts_mean, norm_has_unit_offset=unit_offset)


def as_measured(facts: Architecture, model: nn.Module) -> Architecture:
    """Return the architecture with the form that the norms of its first block have.

    The architecture does not change unless all norms have one known form.

    Args:
        facts: Architecture of the model, which says how its norms compute.
        model: The whole model; meta tensors suffice.
    """
    block, width = decoder_blocks(model, facts)[0].module, int(text_config(model).hidden_size)
    forms = {form_of(norm, width) for norm in matching(block, filter(None, norms_and_readers(facts))).values()}
    form = forms.pop() if len(forms) == 1 else None
    return facts if form is None else attrs.evolve(facts, norm_subtracts_mean=form[0], norm_has_unit_offset=form[1])


@torch.no_grad()
def form_of(norm: nn.Module, width: int) -> tuple[bool, bool] | None:
    """Return whether a norm subtracts the mean and whether it has a unit offset.

    None if it is neither a LayerNorm nor an RMSNorm.

    Args:
        norm: Module that takes ``[…, width]``, with an optional weight and bias ``[width]``. If they are on
            the meta device, a copy with other values runs, since the form does not depend on them.
        width: Channels of the input.
    """
    if any(p.is_meta for p in norm.parameters()):
        norm = _with_values(norm)
    weight, bias = (p if isinstance(p := getattr(norm, name, None), nn.Parameter) else None for name in ("weight", "bias"))
    if any(p is not None and p.shape != (width,) for p in (weight, bias)):
        return None
    like = next((p for p in (weight, bias) if p is not None), torch.empty(0))
    # The scale is large compared with any epsilon, and the mean is as large as the deviation.
    x = PROBE_SCALE * (1 + torch.randn(4, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(like.device))
    output = norm(x.to(like.dtype))
    if not isinstance(output, Tensor) or output.shape != x.shape:
        return None
    output = output.float() - (0 if bias is None else bias.float())
    for subtracts_mean in (False, True):
        centred = x - x.mean(-1, keepdim=True) if subtracts_mean else x
        plain = centred / centred.square().mean(-1, keepdim=True).sqrt()
        for unit_offset in (False, True) if weight is not None else (False,):
            expected = plain if weight is None else plain * (weight.float() + unit_offset)
            if bool((output - expected).abs().max() <= TOLERANCE * expected.abs().max()):
                return subtracts_mean, unit_offset
    return None


def _with_values(norm: nn.Module) -> nn.Module:
    """Return a copy of a norm on the CPU whose parameters have values around 1, none of them 1."""
    copied = copy.deepcopy(norm).to_empty(device="cpu")
    for parameter in copied.parameters():
        parameter.copy_(torch.linspace(0.5, 1.4, parameter.numel(), dtype=torch.float32).view_as(parameter))
    return copied
