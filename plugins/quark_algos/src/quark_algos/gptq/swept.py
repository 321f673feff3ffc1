"""Swept: a weight whose columns are rounded one after another, with the errors of the rounded columns."""

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
        q: The rounded weight, Qᵀ ``[K, N]``, with the channels in the original order.
        e: The errors, Eᵀ ``[K, N]``, in the order in which columns are rounded.
        loss: The loss of each row, ``[N]``. It is ``Σ_k d_k (t_k − q_k)²``, which equals ``e (H + λ I) eᵀ``
            for the row e of E.
        order: The order in which columns are rounded, ``[K]``. None for the original order.
        t: The values before rounding, Tᵀ ``[K, N]``, in the order in which columns are rounded. None if
            ``causal`` is None.
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
        """Return an object with uninitialized tensors for a weight Wᵀ. Only the loss is set, to 0."""
        t = None if causal is None else torch.empty_like(wt)
        return cls(torch.empty_like(wt), torch.empty_like(wt), wt.new_zeros(wt.shape[1]), order, t, causal)

    @classmethod
    def beside(cls, parts: Sequence[Swept]) -> Swept:
        """Join consecutive slices of rows, which were rounded in the same order, into one object."""
        if len(parts) == 1:
            return parts[0]
        q, e, loss = (torch.cat([getattr(part, name) for part in parts], -1) for name in ("q", "e", "loss"))
        return cls(q, e, loss, parts[0].order)

    def places(self, start: int, stop: int) -> slice | Tensor:
        """Return the channels, in the original order, of the columns that are rounded from ``start`` to
        ``stop``.
        """
        return slice(start, stop) if self.order is None else self.order[start:stop]
