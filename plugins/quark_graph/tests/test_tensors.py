"""Parameters of a graph: one that several nodes read lies before all of them."""

from __future__ import annotations

import torch
from torch import nn

from quark_graph import capture
from quark_graph.tensors import free_path, set_parameter, value_of


def test_a_new_parameter_is_read_by_all_its_readers_and_lies_before_the_first() -> None:
    x, value = torch.randn(3, 2), torch.randn(2, 2)
    graph = capture(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).eval(), (x,))
    readers = [node for node in graph.graph.nodes if str(node.target) == "aten.linear.default"]
    assert len(readers) == 2
    node = set_parameter(graph, readers[::-1], None, "weight", "shared", value)
    graph.graph.lint()
    graph.recompile()
    assert torch.equal(value_of(graph, node), value)
    torch.testing.assert_close(graph(x), x @ value.t() @ value.t())


def test_a_path_is_free_where_nothing_is_and_no_tensor_is_in_the_way() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert free_path(model, "new.weight") == "new.weight"
    assert free_path(model, "0.scale") == "0.scale"
    assert free_path(model, "0.weight") == "0.weight_1"
