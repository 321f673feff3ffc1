"""Kernels of torch that compute products, factorizations and sums in another order, as the libraries of another CPU would.

`install` replaces torch's CPU kernels in this process, in all its threads and forks. Operations that torch
builds from these kernels change too (``matmul``, ``linear``, ``einsum``, losses, gradients). A result is as
exact as the original kernel's result: sums have the same precision, and are rounded once. Results on integers
and exact results keep their bits.

A sum is split in two, at a place that depends on its length and on the operands' shapes and strides. As on a
real CPU, the same call with the same data gives the same bits. The same numbers may give other bits in a
transposed copy, in a larger batch or with more rows. Sums that read memory directly, and factorizations, also
depend on the alignment of memory. Matrix products do not, since libraries copy tiles to aligned memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["install"]

_NARROW = (torch.bfloat16, torch.float16)
_FLOATS = (*_NARROW, torch.float32, torch.float64)
_ALIGNED = 64
"""Bytes of a vector register and of a cache line: a kernel reads aligned and unaligned data by different loops.
"""
_ORIGINAL: dict[str, Any] = {}
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_installed: list[torch.library.Library] = []


def install() -> None:
    """Replace the kernels; later calls in the same process do nothing."""
    if _installed:
        return
    library = torch.library.Library("aten", "IMPL")
    _installed.append(library)  # a deleted library would remove its kernels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of replaced kernels
        for name, kernel in _KERNELS.items():
            _ORIGINAL[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, _guarded(kernel, name), "CPU")


def _guarded(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a kernel whose inner operations no mode of torch sees; for other than floating point, it calls the original."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            floats = args[0].dtype in _FLOATS and not any(isinstance(x, Tensor) and x.dtype not in _FLOATS for x in kwargs.values())
            return kernel(*args, **kwargs) if floats else _original(name, *args, **kwargs)

    return guarded


def _original(name: str, *args: Any, **kwargs: Any) -> Any:
    return _ORIGINAL[name].call_boxed(_KEYS, *args, **kwargs)


def _split(length: int, *tensors: Tensor, tiled: bool = False) -> int:
    """Return where a sum of ``length`` terms is split: a place in its second third that depends on the tensors' layout."""
    laid_out = [(tuple(x.shape), tuple(x.stride()), 0 if tiled else x.data_ptr() % _ALIGNED) for x in tensors]
    third = max(length // 3, 1)
    return third + hash((length, *laid_out)) % third if length > 3 else length // 2


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _NARROW else x


def _into(out: Tensor, values: Tensor) -> Tensor:
    if out.shape != values.shape:
        out.resize_(values.shape)
    return out.copy_(values)


# Products


def _product(a: Tensor, b: Tensor, name: str) -> Tensor:
    """Return ``a b`` by the kernel ``mm`` or ``bmm``, in the precision of its sums; K is split in two parts."""
    k = a.shape[-1]
    if k < 2 or a.dtype is not b.dtype:
        return _original(name, _wide(a), _wide(b))
    cut, wa, wb = _split(k, a, b, tiled=True), _wide(a), _wide(b)
    product = _original(name, wa.narrow(-1, cut, k - cut), wb.narrow(-2, cut, k - cut))
    return product.add_(_original(name, wa.narrow(-1, 0, cut), wb.narrow(-2, 0, cut)))


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _checked("mm", a, b) if _unusual(a, b, 2) else _product(a, b, "mm").to(a.dtype)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return _checked("bmm", a, b) if _unusual(a, b, 3) else _product(a, b, "bmm").to(a.dtype)


def _unusual(a: Tensor, b: Tensor, dim: int) -> bool:
    """Return whether the operands are invalid, so that the original kernel should raise its error."""
    return not (a.dim() == b.dim() == dim and a.dtype is b.dtype and a.shape[-1] == b.shape[-2])


def _checked(name: str, *args: Any, **kwargs: Any) -> Any:
    return _original(name, *args, **kwargs)


def _added(name: str) -> Callable[..., Tensor]:
    """Return a function for ``beta self + alpha a b`` that uses the kernel ``mm`` or ``bmm``."""
    own, dim = ("addmm", 2) if name == "mm" else ("baddbmm", 3)

    def added(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if _unusual(a, b, dim) or x.dtype is not a.dtype:
            return _checked(own, x, a, b, beta=beta, alpha=alpha)
        product = _product(a, b, name).mul_(alpha)
        return (product if beta == 0 else product.add_(_wide(x), alpha=beta)).to(a.dtype)

    return added


def _mv(a: Tensor, x: Tensor) -> Tensor:
    if a.dim() != 2 or x.dim() != 1:
        return _checked("mv", a, x)
    return _mm(a, x.unsqueeze(1)).squeeze(1).clone()


def _addmv(y: Tensor, a: Tensor, x: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if a.dim() != 2 or x.dim() != 1 or y.dtype is not a.dtype:
        return _checked("addmv", y, a, x, beta=beta, alpha=alpha)
    return _added("mm")(y.reshape(-1, 1) if y.dim() else y, a, x.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1).clone()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() != 1 or a.shape != b.shape or a.dtype is not b.dtype:
        return _checked("dot", a, b)
    return _mm(a.unsqueeze(0), b.unsqueeze(1)).view(())


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool, output: Any, groups: int
) -> Tensor:
    rest = (stride, padding, dilation, transposed, output, groups)
    made: Tensor = _original("convolution", x, weight, bias, *rest)
    channels = weight.shape[0] if transposed else weight.shape[1]
    if groups > 1 or channels < 2 or x.dim() != weight.dim() or x.dtype is not weight.dtype:
        return made
    cut, axis, wx, ww = _split(channels, x, weight, tiled=True), 0 if transposed else 1, _wide(x), _wide(weight)
    parts = [
        _original("convolution", wx.narrow(1, start, size), ww.narrow(axis, start, size), None, *rest)
        for start, size in ((cut, channels - cut), (0, cut))
    ]
    values = parts[0].add_(parts[1])
    return made.copy_(values if bias is None else values.add_(_wide(bias).view(-1, *[1] * (x.dim() - 2))))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None, scale: Any = None
) -> Any:
    """Compute attention over keys and values in reversed order."""
    if is_causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril_()
        attn_mask = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill_(~allowed, -math.inf)
    turned = attn_mask if attn_mask is None or attn_mask.shape[-1] == 1 else attn_mask.flip(-1)
    others = (k.flip(-2), v.flip(-2), dropout, False)
    return _original("_scaled_dot_product_flash_attention_for_cpu", q, *others, attn_mask=turned, scale=scale)


# Sums


def _total(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the sum over some dimensions, which are kept, in the precision of ``x``; the longest is split in two parts."""
    longest = max(dims, key=lambda dim: x.shape[dim])
    length = x.shape[longest]
    if length < 2:
        return _original("sum.dim_IntList", x, list(dims), True)
    cut = _split(length, x)
    last, first = x.narrow(longest, cut, length - cut), x.narrow(longest, 0, cut)
    return _original("sum.dim_IntList", last, list(dims), True).add_(_original("sum.dim_IntList", first, list(dims), True))


def _dims(x: Tensor, dim: Sequence[int] | None) -> list[int]:
    return [d % x.dim() for d in dim] if dim else list(range(x.dim()))


def _reduced(name: str, of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a reduction that returns the original's tensor with values from ``of``, which sums in another order and keeps dimensions."""

    def reduced(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = _original(name, x, *args, **kwargs)
        if x.dim() == 0 or x.numel() == 0 or made.dtype not in _FLOATS:
            return made
        wide = x.to(made.dtype) if made.dtype is torch.float64 else _wide(x)
        values = of(wide, *args, **{key: value for key, value in kwargs.items() if key not in ("dtype", "out")})
        return made if values is None else made.copy_(values.view(made.shape))

    return reduced


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _total(x, _dims(x, dim))


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    return _total(x, dims).div_(math.prod(x.shape[d] for d in dims))


def _vector_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    return _total(x.square(), _dims(x, dim)).sqrt_() if ord == 2 else None


def _variance(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    count, lost = math.prod(x.shape[d] for d in dims), 1 if correction is None else correction
    return _total((x - _mean(x, dims)).square_(), dims).div_(max(count - lost, 0))


def _deviation(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _variance(x, dim, correction=correction).sqrt_()


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    made: Tensor = _original("_softmax", x, dim, half_to_float)
    if x.dim() == 0 or x.numel() == 0:
        return made
    powers = (_wide(x) - _wide(x).amax(dim, keepdim=True)).exp_()
    return made.copy_(powers.div_(_total(powers, [dim % x.dim()])))


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    made: Tensor = _original("_log_softmax", x, dim, half_to_float)
    if x.dim() == 0 or x.numel() == 0:
        return made
    shifted = _wide(x) - _wide(x).amax(dim, keepdim=True)
    return made.copy_(shifted.sub_(_total(shifted.exp(), [dim % x.dim()]).log_()))


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    made = _original("native_layer_norm", x, shape, weight, bias, eps)
    wide, dims = _wide(x), list(range(x.dim() - len(shape), x.dim()))
    mean = _mean(wide, dims)
    rstd = _variance(wide, dims, correction=0).add_(eps).rsqrt_()
    values = (wide - mean).mul_(rstd)
    values = values if weight is None else values.mul_(weight)
    return made[0].copy_(values if bias is None else values.add_(bias)), made[1].copy_(mean), made[2].copy_(rstd)


# Factorizations


def _cholesky(h: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """Return L, computed in two blocks of columns."""
    made, info = _original("linalg_cholesky_ex", h, upper=upper, check_errors=check_errors)
    n = h.shape[-1]
    if n < 2 or bool(info.any()):
        return made, info
    cut, lower = _split(n, h), torch.zeros_like(h)
    source = h.mT if upper else h
    first, failed = _original("linalg_cholesky_ex", source[..., :cut, :cut])
    below = _original("linalg_solve_triangular", first, source[..., cut:, :cut].mT, upper=False).mT
    last, also_failed = _original("linalg_cholesky_ex", source[..., cut:, cut:] - torch.matmul(below, below.mT))
    if bool(failed.any()) or bool(also_failed.any()):
        return made, info
    lower[..., :cut, :cut], lower[..., cut:, :cut], lower[..., cut:, cut:] = first, below, last
    return made.copy_(lower.mT if upper else lower), info


def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Return the solution, computed in two blocks of unknowns."""
    named = {"upper": upper, "unitriangular": unitriangular}
    made: Tensor = _original("linalg_solve_triangular", a, b, left=left, **named)
    n = a.shape[-1]
    if n < 2 or a.shape[:-2] != b.shape[:-2]:
        return made
    if not left:  # X A = B is Aᵀ Xᵀ = Bᵀ
        a, b, named["upper"] = a.mT, b.mT, not upper
    cut, solution = _split(n, a, b), torch.empty_like(b)
    ranges = [slice(0, cut), slice(cut, n)]
    if named["upper"]:
        ranges.reverse()
    one, other = ranges
    solution[..., one, :] = _original("linalg_solve_triangular", a[..., one, one], b[..., one, :], **named)
    right = b[..., other, :] - torch.matmul(a[..., other, one], solution[..., one, :])
    solution[..., other, :] = _original("linalg_solve_triangular", a[..., other, other], right, **named)
    return made.copy_(solution if left else solution.mT)


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool) -> Tensor:
    made: Tensor = _original("_cholesky_solve_helper", b, factor, upper)
    lower = factor.mT if upper else factor
    return made.copy_(_solve_triangular(lower.mT, _solve_triangular(lower, b, upper=False), upper=True))


def _cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    made: Tensor = _original("cholesky_inverse", factor, upper)
    lower = factor.mT if upper else factor
    inverse = _solve_triangular(lower, torch.eye(factor.shape[-1], dtype=factor.dtype).expand(lower.shape), upper=False)
    return made.copy_(torch.matmul(inverse.mT, inverse))


def _eigh(h: Tensor, UPLO: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors, computed with rows and columns reversed; signs of eigenvectors may differ."""
    values, vectors = _original("_linalg_eigh", h, UPLO, compute_v)
    own, reversed_vectors = _original("_linalg_eigh", h.flip(-2, -1), "U" if UPLO == "L" else "L", compute_v)
    return values.copy_(own), vectors.copy_(reversed_vectors.flip(-2)) if compute_v else vectors


def _qr(a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    q, r = _original("linalg_qr", a, mode)
    other_q, other_r = _original("linalg_qr", a.double(), mode)
    return q.copy_(other_q), r.copy_(other_r)


def _with_out(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, out, **kwargs: _into(out, kernel(*args, **kwargs))


def _in_place(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: x.copy_(kernel(x, *args, **kwargs))


_KERNELS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "mm.out": _with_out(_mm),
    "bmm": _bmm,
    "bmm.out": _with_out(_bmm),
    "addmm": _added("mm"),
    "addmm.out": _with_out(_added("mm")),
    "addmm_": _in_place(_added("mm")),
    "baddbmm": _added("bmm"),
    "baddbmm.out": _with_out(_added("bmm")),
    "baddbmm_": _in_place(_added("bmm")),
    "mv": _mv,
    "mv.out": _with_out(_mv),
    "addmv": _addmv,
    "addmv.out": _with_out(_addmv),
    "addmv_": _in_place(_addmv),
    "dot": _dot,
    "convolution": _convolution,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "sum.dim_IntList": _reduced("sum.dim_IntList", _sum),
    "sum.IntList_out": _reduced("sum.IntList_out", _sum),
    "mean.dim": _reduced("mean.dim", _mean),
    "mean.out": _reduced("mean.out", _mean),
    "linalg_vector_norm": _reduced("linalg_vector_norm", _vector_norm),
    "var.correction": _reduced("var.correction", _variance),
    "std.correction": _reduced("std.correction", _deviation),
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "native_layer_norm": _layer_norm,
    "linalg_cholesky_ex": _cholesky,
    "linalg_solve_triangular": _solve_triangular,
    "_cholesky_solve_helper": _cholesky_solve,
    "cholesky_inverse": _cholesky_inverse,
    "_linalg_eigh": _eigh,
    "linalg_qr": _qr,
}
