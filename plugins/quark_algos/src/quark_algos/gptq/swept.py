"""`Swept`: a weight whose columns are rounded one after another, and the errors of these columns."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

__all__ = ["Swept"]


@attrs.frozen(eq=False)
class Swept:
    """The state of a weight while its columns are rounded, and the result at the end.

    Attributes:
        q: The rounded weight, Qᵀ ``[K, N]``, with the channels in the original order.
        e: The errors, Eᵀ ``[K, N]``, in the order in which columns are rounded.
        loss: The loss of each row of W, ``[N]``. It is ``Σ_k d_k (t_k − q_k)²``. d_k are the pivots of the
            factor. For a row e of E, this sum equals ``e (H + λ I) eᵀ``.
        order: The order in which columns are rounded, ``[K]``. None means the original order.
        t: The values before rounding, Tᵀ ``[K, N]``, in the order in which columns are rounded. It is None if
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
        """Return an object with uninitialized tensors for a weight Wᵀ. Only the loss is initialized: it is
        0.
        """
        t = None if causal is None else torch.empty_like(wt)
        return cls(torch.empty_like(wt), torch.empty_like(wt), wt.new_zeros(wt.shape[1]), order, t, causal)

    @classmethod
    def beside(cls, parts: Sequence[Swept]) -> Swept:
        """Join the objects of consecutive slices of rows into one object. All slices must have been rounded
        in the same order.
        """
        if len(parts) == 1:
            return parts[0]
        q, e, loss = (torch.cat([getattr(part, name) for part in parts], -1) for name in ("q", "e", "loss"))
        return cls(q, e, loss, parts[0].order)

    def places(self, start: int, stop: int) -> slice | Tensor:
        """Return the original indices of the columns that are rounded at the positions ``start`` to
        ``stop``.
        """
        return slice(start, stop) if self.order is None else self.order[start:stop]
