"""Which tensors are quantized, and which share a quantizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from quark.config.enums import QuantizationMode
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.models.layers import QuantizerModule, RoundedParameter
from quark_graph import capture, quantize_graph

INT8 = QTensorConfig(dtype="int8", qscheme="per_tensor", observer_cls="PerTensorMinMaxObserver", symmetric=True, is_dynamic=False)
OTHER = INT8.set(dtype="int4")
DYNAMIC = QTensorConfig(dtype="int8", qscheme="per_channel", ch_axis=-1, symmetric=True, is_dynamic=True)
BOTH = QLayerConfig(input_tensors=INT8, output_tensors=INT8)


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def quantized(model: nn.Module, *args: Tensor, layer: QLayerConfig = BOTH, **fields: Any) -> fx.GraphModule:
    config = QConfig(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode, **fields)
    return quantize_graph(capture(model.eval(), args), config, [args])


def calls(graph: fx.GraphModule) -> dict[str, str]:
    """Return the paths of the activation quantizers, by the name of the node that each is called with.

    Of two quantizers of one node, the last is kept.
    """
    modules = dict(graph.named_modules())
    quantizers = [n for n in graph.graph.nodes if n.op == "call_module" and type(modules[n.target]) is QuantizerModule]
    return {str(node.args[0]): str(node.target) for node in quantizers}


def test_a_tensor_between_two_operators_is_quantized_once() -> None:
    graph = quantized(Function(lambda x: functional.gelu(x + x).tanh()), torch.randn(2, 3))
    outputs = {"add": "add.output_quantizer", "gelu": "gelu.output_quantizer", "tanh": "tanh.output_quantizer"}
    assert calls(graph) == {"args_0": "add.input_quantizer", **outputs}


def test_two_specs_for_one_tensor_are_two_quantizers() -> None:
    narrow = QLayerConfig(input_tensors=OTHER)
    graph = quantized(Function(lambda x: torch.tanh(x + x) * x), torch.randn(2, 3), layer_type_quant_config={"tanh": narrow})
    tanh = next(node for node in graph.graph.nodes if str(node.target) == "aten.tanh.default")
    (inner,) = tanh.all_input_nodes
    assert inner.target == "tanh.input_quantizer"
    assert inner.all_input_nodes[0].target == "add.output_quantizer", "the output of the sum is quantized first"
    assert "tanh" not in calls(graph) or calls(graph)["tanh"] == "mul.input_quantizer"


def test_a_relu_continues_what_is_in_front_of_it() -> None:
    graph = quantized(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU()), torch.randn(2, 1, 4, 4))
    assert set(calls(graph)) == {"input_1", "relu"}, "nothing between the convolution and the ReLU"


def test_what_a_convolution_asks_of_its_output_goes_behind_the_relu() -> None:
    only = QLayerConfig(output_tensors=INT8)
    types = {"conv2d": only, "relu": QLayerConfig(input_tensors=INT8)}
    graph = quantized(
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU()), torch.randn(2, 1, 4, 4), layer=QLayerConfig(), layer_type_quant_config=types
    )
    assert set(calls(graph)) == {"relu"}


def test_a_relu_whose_input_others_read_shares_its_quantizer() -> None:
    graph = quantized(Function(lambda x: torch.relu(x + x) - (x + x)), torch.randn(2, 3))
    both = quantized(Function(_relu_and_input), torch.randn(2, 3))
    assert "add" not in calls(graph)
    assert calls(both)["add"] == calls(both)["relu"]


def _relu_and_input(x: Tensor) -> Tensor:
    y = x + x
    return torch.relu(y) - y


def test_joined_tensors_share_a_quantizer_that_holds_all_of_them() -> None:
    def joined(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([torch.tanh(x), y * 1.0], dim=1).reshape(-1)

    graph = quantized(Function(joined), torch.randn(2, 3), torch.full((2, 3), 40.0))
    names = calls(graph)
    assert len({names[tensor] for tensor in ("tanh", "mul", "cat", "reshape")}) == 1
    quantizer = graph.get_submodule(names["cat"])
    assert isinstance(quantizer, QuantizerModule)
    assert quantizer.scale is not None
    torch.testing.assert_close(quantizer.scale, torch.tensor(40 / 127.5), rtol=0.01, atol=0)


def test_an_operator_that_moves_values_changes_none() -> None:
    x = torch.randn(2, 4, 8, 8)
    graph = quantized(Function(lambda x: functional.max_pool2d(x, 2).transpose(1, 2).flatten(1)), x)
    values = graph(x).unique()
    (name,) = set(calls(graph).values())
    quantizer = graph.get_submodule(name)
    assert torch.equal(values, quantizer(values)), "all are on the grid of the input"
    assert torch.isin(values, quantizer(x)).all()


def test_a_tensor_that_cannot_be_shared_is_not_quantized_again_where_values_move() -> None:
    layer = QLayerConfig(input_tensors=DYNAMIC)
    graph = quantized(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), torch.randn(2, 3, 4), layer=layer)
    assert calls(graph) == {"flatten": "1.input_quantizer"}


def test_the_parts_of_a_split_share_its_quantizer() -> None:
    def crossed(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        return left * right

    graph = quantized(Function(crossed), torch.randn(2, 6))
    names = calls(graph)
    assert names["args_0"] == names["getitem"] == names["getitem_1"]


def test_an_embedding_is_quantized_where_it_is_named() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
    layer = QLayerConfig(weight=INT8)
    plain, named = (quantized(model, torch.arange(3), layer=layer, layer_type_quant_config=types) for types in ({}, {nn.Embedding: layer}))
    rounded = [[n for n, m in graph.named_modules() if isinstance(m, RoundedParameter)] for graph in (plain, named)]
    assert rounded == [["1.weight_quantizer"], ["0.weight_quantizer", "1.weight_quantizer"]]


def test_a_weight_that_two_calls_share_is_rounded_once_and_one_that_is_also_read_in_float_keeps_its_values() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(8, 4), nn.Linear(4, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.layer(self.layer(self.table(tokens)))
            return functional.linear(x, self.table.weight)

    model = Tied()
    graph = quantized(model, torch.arange(5), layer=QLayerConfig(weight=INT8))
    assert torch.equal(graph.get_parameter("table.weight"), model.table.weight)
    names = [name for name, module in graph.named_modules() if isinstance(module, RoundedParameter)]
    assert names == ["layer.weight_quantizer", "linear_2.weight_quantizer"]
    assert not torch.equal(graph.get_parameter("linear_2.weight"), model.table.weight)


def test_two_groups_that_one_operator_joins_become_one_with_all_their_members() -> None:
    def joined(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([torch.tanh(x).reshape(-1), (y * 1.0).reshape(-1)])

    graph = quantized(Function(joined), torch.randn(2, 3), torch.full((2, 3), 40.0))
    names = calls(graph)
    inner = {tensor: name for tensor, name in names.items() if not tensor.startswith("args")}
    assert len(inner) == 5, "tanh, mul, the two that reshape them, cat"
    assert len(set(inner.values())) == 1
    quantizer = graph.get_submodule(names["tanh"])
    assert isinstance(quantizer, QuantizerModule)
    assert quantizer.scale is not None
    torch.testing.assert_close(quantizer.scale, torch.tensor(40 / 127.5), rtol=0.01, atol=0)
