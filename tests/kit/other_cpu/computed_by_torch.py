"""Write torch's results for many operators in this process to a file: ``python computed_by_torch.py FILE``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

TERMS = 65
"""Number of terms of the longest sum."""


def products(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(shape, generator=generator).to(dtype) for shape in ((33, TERMS), (TERMS, 17), (33, 17)))
    many, others = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 33, TERMS), (3, TERMS, 17)))
    heads = torch.randn(2, 4, 9, 16, generator=generator).to(dtype)
    yield "mm", a @ b
    yield "mm.out", torch.mm(a, b, out=torch.empty(33, 17, dtype=dtype))
    yield "addmm", torch.addmm(c, a, b, beta=0.5, alpha=2)
    yield "addmm_", c.clone().addmm_(a, b, alpha=-1)
    yield "bmm", many @ others
    yield "baddbmm", torch.baddbmm(torch.ones(3, 33, 17).to(dtype), many, others, beta=2)
    yield "mv", a @ b[:, 0]
    yield "addmv", torch.addmv(c[:, 0], a, b[:, 0])
    yield "dot", a[0] @ b[:, 0]
    yield "linear", F.linear(many, b.t(), c[0])
    yield "einsum", torch.einsum("bik,bkj->bij", many, others)
    yield "convolution", F.conv1d(many, many[:5, :, :3].contiguous(), c[0, :3])
    yield "causal attention", F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    yield "attention of groups", F.scaled_dot_product_attention(heads, heads[:, :2], heads[:, :2], enable_gqa=True)


def sums(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    many = torch.randn(3, 33, TERMS, generator=torch.Generator().manual_seed(1)).to(dtype)
    yield "sum", many.sum()
    yield "sum of rows", many.sum(-1)
    yield "mean", many.mean((0, 2), keepdim=True)
    yield "variance", many.var(1)
    yield "deviation", many.std()
    yield "norm", many.norm(dim=2)
    yield "softmax", many.softmax(-1)
    yield "log_softmax", many.log_softmax(1)
    yield "logsumexp", many.logsumexp(2)
    yield "layer_norm", F.layer_norm(many, (TERMS,), many[0, 0], many[0, 1])
    yield "rms_norm", F.rms_norm(many, (TERMS,), many[0, 0])


def factorizations(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    x = torch.randn(40, TERMS, generator=torch.Generator().manual_seed(2)).to(dtype)
    # The eigenvalues are within a factor of 30, so solutions amplify errors by at most this factor.
    h, b = x @ x.t() + TERMS * torch.eye(40, dtype=dtype), x[:, :7]
    yield "cholesky", torch.linalg.cholesky(h)
    yield "cholesky upper", torch.linalg.cholesky(h, upper=True)
    lower = torch.linalg.cholesky(h)
    yield "cholesky_inverse", torch.cholesky_inverse(lower)
    yield "cholesky_solve", torch.cholesky_solve(b, lower)
    yield "solve_triangular", torch.linalg.solve_triangular(lower, b, upper=False)
    yield "solve_triangular from the right", torch.linalg.solve_triangular(lower.mT, b.t(), upper=True, left=False)
    yield "eigh", torch.linalg.eigh(h).eigenvalues
    yield "qr", torch.linalg.qr(h).R


def exact() -> Iterator[tuple[str, Tensor]]:
    """Yield sums that have the same bits in every order."""
    whole = torch.randint(-9, 9, (33, TERMS), generator=torch.Generator().manual_seed(3))
    yield "integers", whole @ whole.t()
    yield "sum of integers", whole.sum(1)
    for dtype in (torch.float32, torch.float64):
        floats = whole.to(dtype)
        yield f"integers in {dtype}", floats @ floats.t()
        yield f"sum of integers in {dtype}", floats.sum(0)
    yield "largest", whole.float().norm(torch.inf)


def memory() -> Iterator[tuple[str, Tensor]]:
    """Yield differences of products and sums of the same numbers, with equal and with different layouts in memory."""
    for n in (64, 80, 96):
        x = torch.randn(n, n, generator=torch.Generator().manual_seed(n))
        shifted = torch.empty(x.numel() + 3)[3:].view(x.shape).copy_(x)
        yield f"again {n}", x @ x - x.clone() @ x
        yield f"unaligned {n}", x.sum(1) - shifted.sum(1)
        yield f"unaligned product {n}", x @ x - shifted @ x
        yield f"transposed {n}", x @ x - x.t().contiguous().t() @ x
        yield f"more rows {n}", x @ x - (torch.cat([x, x]) @ x)[:n]


def computed() -> dict[str, Tensor]:
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for function in (products, sums, factorizations)[: 2 if dtype is torch.bfloat16 else 3]:
            found |= {f"{name} {dtype}": value for name, value in function(dtype)}
    found |= {f"exact {name}": value for name, value in exact()} | {f"memory {name}": value for name, value in memory()}
    weight = torch.randn(8, TERMS, generator=torch.Generator().manual_seed(5)).requires_grad_()
    F.linear(weight, weight).softmax(-1).square().sum().backward()
    assert weight.grad is not None
    return found | {"gradient": weight.grad, "lies": lies()}


def lies() -> Tensor:
    """Return the strides of results that are not contiguous."""
    h = torch.eye(4)
    heads = torch.ones(2, 4, 9, 16)
    solved = torch.linalg.solve_triangular(h, h, upper=False)
    made = (torch.linalg.cholesky(h), solved, F.scaled_dot_product_attention(heads, heads, heads)[0])
    return torch.tensor([x.stride()[:2] for x in made])


if __name__ == "__main__":
    torch.save(computed(), sys.argv[1])
