"""Swept: a weight whose columns are rounded, with the errors that are still to be compensated."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

__all__ = ["Swept"]


@attrs.frozen(eq=False)
class Swept:
    """A weight whose columns are rounded.

    Attributes:
        q: Qᵀ ``[K, N]``, its channels in their own order.
        e: Eᵀ ``[K, N]``, in the order in which they were rounded.
        loss: ``Σ_k d_k (t_k − q_k)²``, which is ``tr(E (H + λ I) Eᵀ)`` of each row ``[N]``.
        order: That order ``[K]``, or None for their own.
        t: Tᵀ ``[K, N]``, what was rounded, in that order; with ``causal`` alone.
        causal: As of `ldlq`.
    """

    q: Tensor
    e: Tensor
    loss: Tensor
    order: Tensor | None = None
    t: Tensor | None = None
    causal: Tensor | None = None

    @classmethod
    def room_for(cls, wt: Tensor, order: Tensor | None = None, causal: Tensor | None = None) -> Swept:
        """Return room for a result of the shape of Wᵀ, with nothing rounded yet."""
        t = None if causal is None else torch.empty_like(wt)
        return cls(torch.empty_like(wt), torch.empty_like(wt), wt.new_zeros(wt.shape[1]), order, t, causal)

    @classmethod
    def beside(cls, parts: Sequence[Swept]) -> Swept:
        """Return consecutive slices of the rows as one result; all were rounded in the same order."""
        if len(parts) == 1:
            return parts[0]
        q, e, loss = (torch.cat([getattr(part, name) for part in parts], -1) for name in ("q", "e", "loss"))
        return cls(q, e, loss, parts[0].order)

    def places(self, start: int, stop: int) -> slice | Tensor:
        """Return where the columns that are rounded from ``start`` to ``stop`` are in Q and W."""
        return slice(start, stop) if self.order is None else self.order[start:stop]
