"""Functions that run the norms of a model on test inputs to find out what they compute.

The form of a norm states whether it subtracts the mean, and whether it multiplies by ``1 + weight``.
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
"""Tolerance relative to the largest output. A norm in bfloat16 rounds three times, with an error of 2⁻⁹ each.
Different forms of norms differ by far more than the tolerance.
"""

PROBE_SCALE = 32
"""The inputs with which norms are run have about this magnitude."""


def with_form_of(facts: Architecture, norms: Iterable[tuple[str, nn.Module]], width: int) -> Architecture:
    """Return a copy of the architecture that states the form of the given norms.

    The norms are run to determine this form.

    Args:
        facts: Architecture of the model. It does not state the form of the norms.
        norms: Pairs of name and module, for the norms on the residual stream.
        width: Number of channels of the stream.

    Raises:
        UnsupportedError: A norm is neither a LayerNorm nor an RMSNorm, or the norms have different forms.
    """
    forms: dict[tuple[bool, bool], str] = {}
    for name, norm in norms:
        form = form_of(norm, width)
        if form is None:
            raise UnsupportedError(
                f"'{name}' ({type(norm).__name__}) is neither a LayerNorm nor an RMSNorm, so no rotation commutes with it. Leave out "
                f"rotation"
            )
        forms.setdefault(form, name)
    if len(forms) > 1:
        raise UnsupportedError(f"{' and '.join(forms.values())} are norms of different forms, so no rotation fits both. Leave out rotation")
    ((subtracts_mean, unit_offset),) = forms
    return attrs.evolve(facts, norm_subtracts_mean=subtracts_mean, norm_has_unit_offset=unit_offset)


def as_measured(facts: Architecture, model: nn.Module) -> Architecture:
    """Return a copy of the architecture that states the form of the norms in the first block.

    The norms are run to determine this form.

    If these norms have different forms or an unknown form, return the architecture unchanged.

    Args:
        facts: Architecture of the model. It may state a wrong form of the norms.
        model: The whole model. Its tensors may be on the meta device.
    """
    block, width = decoder_blocks(model, facts)[0].module, int(text_config(model).hidden_size)
    forms = {form_of(norm, width) for norm in matching(block, filter(None, norms_and_readers(facts))).values()}
    form = forms.pop() if len(forms) == 1 else None
    return facts if form is None else attrs.evolve(facts, norm_subtracts_mean=form[0], norm_has_unit_offset=form[1])


@torch.no_grad()
def form_of(norm: nn.Module, width: int) -> tuple[bool, bool] | None:
    """Return whether a norm subtracts the mean, and whether it multiplies by ``1 + weight``.

    Return None if the norm is neither a LayerNorm nor an RMSNorm.

    Args:
        norm: A module for inputs ``[…, width]``. It may have a weight and a bias ``[width]``. If these are on
            the meta device, a copy with other values is run, because the form does not depend on the values.
        width: Number of channels of the input.
    """
    if any(p.is_meta for p in norm.parameters()):
        norm = _with_values(norm)
    weight, bias = (p if isinstance(p := getattr(norm, name, None), nn.Parameter) else None for name in ("weight", "bias"))
    if any(p is not None and p.shape != (width,) for p in (weight, bias)):
        return None
    like = next((p for p in (weight, bias) if p is not None), torch.empty(0))
    # The inputs are large compared with any epsilon, and their mean is as large as their standard deviation.
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
    """Return a copy of a norm on the CPU. All values of the copy's parameters are close to 1 but not equal to
    1.
    """
    copied = copy.deepcopy(norm).to_empty(device="cpu")
    for parameter in copied.parameters():
        parameter.copy_(torch.linspace(0.5, 1.4, parameter.numel(), dtype=torch.float32).view_as(parameter))
    return copied
