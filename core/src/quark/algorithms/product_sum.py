"""`ProductSum` sums products of channels over batches of tokens, for a Hessian or a cross moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import call
from typing import Any

import torch
from torch import Tensor

from quark.base.parallel import parallel_map, row_slices
from quark.base.ranks import Ranks

_STRIP = 128
"""Number of rows of a Hessian that are summed at a time.

A strip of rows begins at the diagonal, so all strips need little more than half of the work of the full
product.
"""
_FEW_STRIPS = 4
"""Number of strips on devices that process one strip at a time. The strips are 5/8 of the full product."""
_WAITING = 2048
"""Number of tokens that are collected on CPUs before their products are added."""
_CONVERTED = 512
"""Number of 16-bit tokens that CPUs convert to float32 at a time, so that they stay in the cache."""
HALVES = (torch.float16, torch.bfloat16)
_PRECISION = threading.Lock()


class ProductSum:
    """The sum ``Σ aᵀ b [rows, K]`` over batches of tokens ``a`` and ``b``.

    The rows are cut into strips, which several threads compute. On CPUs, batches are collected until they
    have `_WAITING` tokens, so that threads synchronize less often.

    Args:
        rows: Number of channels of ``a``.
        columns: K, the number of channels of ``b``.
        dtype: Dtype of the sum over batches. Within a batch, the sum is float32.
        device: Device of the batches.
        is_symmetric: Whether ``a`` is ``b`` in every batch. If so, a strip is computed only from its first
            entry on the diagonal to the right, and fourth moments are summed too.

    Attributes:
        others: Sums, over all batches, of the two moments that `_fourth_moments` returns. They are complete
            only after a call of `total`.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, is_symmetric: bool) -> None:
        self._sum = torch.zeros(rows, columns, dtype=dtype, device=device)
        self._is_symmetric = is_symmetric
        self._is_mirrored = True
        self.others: Tensor | float = 0.0
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add the product ``aᵀ b`` of ``a [tokens, rows]`` and ``b [tokens, K]``.

        The tensors are not copied, so do not change them after the call.
        """
        self._waiting.append((a, b))
        if a.device.type != "cpu" or sum(len(tokens) for tokens, _ in self._waiting) >= _WAITING:
            self._sum_up()

    def merge(self, other: ProductSum) -> None:
        """Add ``other``, a sum with the same shape and dtype."""
        self._sum_up()
        self._sum += other.total()
        self.others = self.others + other.others

    def sum_over(self, ranks: Ranks) -> None:
        """Add the sums of all other ranks. Of a symmetric sum, the ranks exchange only the upper triangle."""
        if ranks.size == 1:
            return
        self._sum_up()
        if self._is_symmetric:
            strips = [self._sum[rows, rows.start :] for rows in row_slices(len(self._sum), 1, _STRIP)]
            triangle = torch.cat([strip.reshape(-1) for strip in strips])
            ranks.sum_(triangle)
            for strip, part in zip(strips, triangle.split([strip.numel() for strip in strips]), strict=True):
                strip.copy_(part.view_as(strip))
            self._is_mirrored = False
        else:
            ranks.sum_(self._sum)
        self.others = sum(ranks.gather(self.others), start=0.0)

    def __getstate__(self) -> dict[str, Any]:
        """Add all waiting batches, and return the state that is sent to other ranks."""
        self._sum_up()
        return self.__dict__

    def total(self) -> Tensor:
        """Return the accumulated tensor itself, not a copy. Do not change the tensor."""
        self._sum_up()
        if self._is_symmetric and not self._is_mirrored:
            _mirror_upper_(self._sum)
            self._is_mirrored = True
        return self._sum

    def _sum_up(self) -> None:
        if not self._waiting:
            return
        batches, self._waiting, self._is_mirrored = self._waiting, [], False

        def add_to(rows: slice) -> None:
            start = rows.start if self._is_symmetric else 0
            for a, b in batches:
                _add_product(self._sum[rows, start:], a[:, rows], b[:, start:])

        size, device = len(self._sum), self._sum.device
        strips = row_slices(size, 1, _STRIP if device.type == "cpu" else max(_STRIP, -(-size // _FEW_STRIPS)))
        work: list[Callable[[], Tensor | None]] = [partial(add_to, rows) for rows in strips]
        if self._is_symmetric:
            work += [partial(_fourth_moments, a) for a, _ in batches]
        with _multiplied_as_bfloat16() if all(a.dtype is torch.bfloat16 for a, _ in batches) else nullcontext():
            results = parallel_map(call, work, device)
        self.others = sum((other for other in results if other is not None), start=self.others)


def _fourth_moments(x: Tensor) -> Tensor:
    """Return two sums over the tokens of ``x [tokens, K]``, in float64: of ``‖x‖⁴`` and of ``Σ_k x_k⁴``."""
    squares = x.float().square()
    return torch.stack([part.double().square().sum() for part in (squares.sum(1), torch.linalg.vector_norm(squares, dim=1))])


def _mirror_upper_(h: Tensor) -> None:
    """Copy the upper triangle of ``h [K, K]`` to the lower triangle in place.

    The copy is made in strips of rows that fit into the caches of a CPU.
    """

    def mirror(strip: slice) -> None:
        corner = h[strip, strip]
        corner.copy_(corner.triu() + corner.triu(1).t())
        h[strip.stop :, strip] = h[strip, strip.stop :].t()

    parallel_map(mirror, row_slices(len(h), 1, _STRIP), h.device)


@contextmanager
def _multiplied_as_bfloat16() -> Iterator[None]:
    """In a ``with`` block, let CPUs multiply float32 matrices in bfloat16.

    All values of the matrices must be bfloat16 values, so that no product changes. oneDNN then uses AMX, or
    AVX-512 if the CPU has no AMX. Otherwise MKL would multiply, and MKL uses AVX-512 only on Intel CPUs. Sums
    stay float32. The setting applies to the whole process, so a lock lets only one thread at a time change
    it.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # set when torch replaces the module
    with _PRECISION:
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        try:
            yield
        finally:
            matmul.fp32_precision = before


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``aᵀ b`` to ``target`` in place.

    The product is computed in float32, and then added in the dtype of ``target``.
    """
    if a.dtype in HALVES and a.device.type == "cpu":
        for tokens in zip(a.split(_CONVERTED), b.split(_CONVERTED), strict=True):
            _add_product(target, *(part.float() for part in tokens))
        return
    product: dict[str, Any] = {"out_dtype": torch.float32} if a.dtype in HALVES else {}
    if target.dtype is torch.float32:
        torch.addmm(target, a.t(), b, **product, out=target)
    else:
        target += torch.mm(a.t(), b, **product)
