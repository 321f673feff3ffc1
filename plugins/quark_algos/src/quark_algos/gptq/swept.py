"""Swept: a weight whose columns are rounded, with the errors that are still to be compensated."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

__all__ = ["Swept"]


@attrs.frozen(eq=False)
class Swept:
    """A weight with rounded columns.

    Attributes:
        q: Qᵀ ``[K, N]``, channels in the original order.
        e: Eᵀ ``[K, N]``, columns in rounding order.
        loss: ``Σ_k d_k (t_k − q_k)²``, which is ``tr(E (H + λ I) Eᵀ)`` of each row ``[N]``.
        order: The rounding order ``[K]``; None for the original order.
        t: Tᵀ ``[K, N]``, the values before rounding, in rounding order; only with ``causal``.
        causal: As in `ldlq`.
    """

    q: Tensor
    e: Tensor
    loss: Tensor
    order: Tensor | None = None
    t: Tensor | None = None
    causal: Tensor | None = None

    @classmethod
    def room_for(cls, wt: Tensor, order: Tensor | None = None, causal: Tensor | None = None) -> Swept:
        """Return an empty result with the shape of Wᵀ."""
        t = None if causal is None else torch.empty_like(wt)
        return cls(torch.empty_like(wt), torch.empty_like(wt), wt.new_zeros(wt.shape[1]), order, t, causal)

    @classmethod
    def beside(cls, parts: Sequence[Swept]) -> Swept:
        """Join consecutive slices of rows, rounded in the same order, into one result."""
        if len(parts) == 1:
            return parts[0]
        q, e, loss = (torch.cat([getattr(part, name) for part in parts], -1) for name in ("q", "e", "loss"))
        return cls(q, e, loss, parts[0].order)

    def places(self, start: int, stop: int) -> slice | Tensor:
        """Return the positions in Q and W of the columns rounded from ``start`` to ``stop``."""
        return slice(start, stop) if self.order is None else self.order[start:stop]
