"""Llama 4.

The fused experts of a checkpoint, whose matrices are ``[in, out]``, as one layer for each expert and
projection.
"""

from __future__ import annotations

import pytest
import torch

from quark.models.hf.weight_converters import make_converters
from quark_templates.llama import LLAMA4, LLAMA4_TEXT

from .converted import converted


@pytest.mark.parametrize("architecture", [LLAMA4_TEXT, LLAMA4], ids=lambda architecture: architecture.model_type)
def test_fused_experts_become_layers_that_compute_the_same(architecture) -> None:  # type: ignore[no-untyped-def]
    experts, hidden, inner = 3, 4, 6
    gate_up, down = torch.randn(experts, hidden, 2 * inner), torch.randn(experts, inner, hidden)
    tensors = {"feed_forward.experts.gate_up_proj": gate_up, "feed_forward.experts.down_proj": down}
    found = converted(tensors, make_converters(architecture.weight_converters))
    assert len(found) == 3 * experts
    x = torch.randn(hidden)
    for number in range(experts):
        gate, up, back = (found[f"feed_forward.experts.{number}.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj"))
        torch.testing.assert_close(torch.cat((gate @ x, up @ x)), x @ gate_up[number])
        torch.testing.assert_close(back @ (up @ x), (up @ x) @ down[number])
