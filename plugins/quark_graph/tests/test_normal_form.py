"""The normal form of a graph computes the same: folded batch norms, operators in place, stacked weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from quark.errors import UnsupportedError
from quark_graph.graph_capture import capture
from quark_graph.normal_form import BatchNorm, folded_parameters, normal_form
from quark_graph.operators import schema_name


def randomized(model: nn.Module) -> nn.Module:
    """The model with batch norms that do something, in inference mode."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            for tensor in (module.running_mean, module.weight, module.bias):
                if tensor is not None:
                    tensor.data.normal_(generator=generator)
            if module.running_var is not None:
                module.running_var.uniform_(0.5, 2, generator=generator)
    return model.eval()


def operators(graph: fx.GraphModule) -> list[str]:
    return [name for node in graph.graph.nodes if (name := schema_name(node))]


def assert_same(model: nn.Module, *args: Tensor, batch_norms: int = 0) -> fx.GraphModule:
    form = normal_form(capture(model, args))
    expected, found = model(*args), form.model(*args)
    # Weights are rounded once to float32 where they are folded: an error of 2^-24 of each product, of which
    # some hundreds are summed.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert form.folded == batch_norms
    norms = sum(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for module in model.modules())
    assert operators(form.model).count("aten::batch_norm") == norms - batch_norms
    assert all(node.users for node in form.model.graph.nodes if node.op in ("get_attr", "call_function")), "what nothing reads goes"
    return form.model


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (2, 4, 8)),
        (nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), (2, 4, 8, 8)),
        (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6, affine=False), (2, 4, 8, 8)),
        (nn.Conv3d(4, 6, 3), nn.BatchNorm3d(6), (2, 4, 4, 4, 4)),
        (nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), (2, 4, 8, 8)),
        (nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6), (2, 4, 8, 8)),
        (nn.Linear(4, 6), nn.BatchNorm1d(6), (3, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_batch_norm_is_folded(layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> None:
    assert_same(randomized(nn.Sequential(layer, norm)), torch.randn(shape), batch_norms=1)


@given(groups=st.sampled_from([1, 2, 3]), is_transposed=st.booleans(), has_bias=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_folding_is_exact(groups: int, is_transposed: bool, has_bias: bool, seed: int) -> None:
    """In float64 nothing else is rounded on the way, and the only difference is the rounding of float64."""
    torch.manual_seed(seed)
    kind = nn.ConvTranspose1d if is_transposed else nn.Conv1d
    layer = kind(6, 12, 2, groups=groups, bias=has_bias).double()
    norm = randomized(nn.BatchNorm1d(12).double())
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    one = BatchNorm(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    weight, bias = folded_parameters(layer.weight, layer.bias, one, is_transposed=is_transposed, groups=groups)
    expected = norm(layer(x))
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_a_batch_norm_stays_where_others_read_what_it_reads() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.norm(y) + y

    assert_same(randomized(Read()), torch.randn(2, 1, 4, 4))


def test_a_batch_norm_over_another_axis_stays() -> None:
    assert_same(randomized(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5))), torch.randn(2, 5, 4))


def test_a_convolution_with_two_batch_norms_gets_two_weights() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.one, self.two = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(self.conv(x)) + self.two(self.conv(x + 1))

    assert_same(randomized(Twice()), torch.randn(2, 1, 4, 4), batch_norms=2)


def test_operators_that_write_are_replaced() -> None:
    def add_twice(x: Tensor) -> Tensor:
        y = x * 2
        y += 1
        return torch.relu_(y)

    graph = assert_same(Function(add_twice).eval(), torch.randn(3, 4))
    assert operators(graph) == ["aten::mul", "aten::add", "aten::relu"]


def test_a_write_to_a_view_that_is_read_again_is_refused() -> None:
    def half(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0].add_(1)
        return y

    graph = capture(Function(half).eval(), (torch.randn(3, 4),))
    with pytest.raises(UnsupportedError, match="run_decompositions"):
        normal_form(graph)


def test_dropouts_are_left_out() -> None:
    graph = assert_same(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval(), torch.randn(2, 4))
    assert operators(graph) == ["aten::linear"]


def test_parts_of_a_stacked_weight_become_weights() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    graph = assert_same(Attention().eval(), torch.randn(2, 5, 8))
    weights = [node.args[1] for node in graph.graph.nodes if schema_name(node) == "aten::linear"]
    assert len(weights) >= 2
    assert {node.op for node in weights} == {"get_attr"}
