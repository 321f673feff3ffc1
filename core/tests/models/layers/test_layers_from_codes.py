"""A layer that runs from codes unpacks its weight while it computes, in slices that suit the device."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quark.config.layer import QLayerConfig
from quark.models.layers import QuantLinear, layers_from_codes, packed_weight
from quark.models.layers.layers_from_codes import UntilUsed, runs_from_codes, until_used
from quark.models.layers.packed_weight import FormatPacking, PackedWeight
from quark_devkit.example_specs import int8_spec
from quark_devkit.simulated_device import simulated_device


def from_codes(linear: nn.Linear) -> Any:
    made = QuantLinear.from_float(linear, QLayerConfig(weight=int8_spec()))
    assert made.weight_quantizer is not None
    quantizer, weight = made.weight_quantizer.quantizer, linear.weight.detach()
    packing, qparams = FormatPacking(quantizer, "reorder", lambda codes: codes), quantizer.find_qparams(weight)
    tensors = packing.pack(quantizer.quantize(weight, qparams), qparams)
    return runs_from_codes(made, PackedWeight(packing, tensors, tuple(weight.shape), weight.dtype))


def test_the_weight_of_the_layer_that_computes_is_unpacked_once_and_that_of_another_is_its_own() -> None:
    one, other = from_codes(nn.Linear(8, 4)), from_codes(nn.Linear(8, 4))
    seen: list[Tensor] = []

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend([one.weight, one.weight, other.weight.clone()])
            return x

    one.input_quantizer = Reads()
    one(torch.randn(3, 8))
    assert seen[0].data_ptr() == seen[1].data_ptr()
    assert torch.equal(seen[2], other.weight)
    assert not torch.equal(one.weight, other.weight)


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_leaves_neither_values_nor_the_layer_behind(fails: bool) -> None:
    layer = from_codes(nn.Linear(8, 4))
    expected = layer.packed_weight.values()
    if fails:
        with pytest.raises(RuntimeError):
            layer(torch.randn(3, 5))
    else:
        layer(torch.randn(3, 8))
    room = packed_weight.weight_room((4, 8), torch.float32, torch.device("cpu"))
    assert room is not None
    room.fill_(math.nan)  # as the next layer that computes overwrites it
    assert torch.equal(layer.weight.clone(), expected)
    kept = weakref.ref(layer)
    del layer
    gc.collect()
    assert kept() is None


def test_shape_dtype_and_device_of_a_weight_are_seen_without_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = from_codes(nn.Linear(8, 4))
    expected = layer.unpack().weight
    monkeypatch.setattr(PackedWeight, "values", lambda *_: pytest.fail("the weight was unpacked"))
    for weight in (layer.weight, layer.get_parameter("weight"), dict(layer.named_parameters())["weight"]):
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.dtype, weight.device, weight.numel()) == ((4, 8), torch.float32, torch.device("cpu"), 32)
    monkeypatch.undo()
    x = torch.randn(3, 8)
    assert torch.equal(layer.weight @ x.t(), expected @ x.t())
    assert torch.equal(nn.functional.linear(x, layer.weight), nn.functional.linear(x, expected))
    assert torch.equal(copy.deepcopy(layer.weight), expected)


def test_a_weight_that_is_changed_in_place_is_in_memory_from_then_on() -> None:
    layer = from_codes(nn.Linear(8, 4))
    expected, weight = layer.unpack().weight / 2, layer.weight
    with torch.no_grad():
        weight.div_(2)
    assert type(layer) is QuantLinear
    assert torch.equal(layer.weight, expected)
    assert torch.equal(weight + 0, expected), "who has the parameter sees the change"


@pytest.mark.parametrize(
    "look",
    [
        lambda layer: layer(torch.ones(1, 8)),
        lambda layer: layer.weight,
        lambda layer: layer.get_parameter("weight"),
        lambda layer: dict(layer.named_parameters()),
        lambda layer: layer.state_dict(),
        lambda layer: layer.to(torch.bfloat16),
    ],
)
def test_a_layer_is_from_codes_until_somebody_looks(look: Any) -> None:
    layer: Any = until_used(from_codes(nn.Linear(8, 4)))
    assert isinstance(layer, UntilUsed)
    assert layer.bias.shape == (4,)
    assert isinstance(layer, UntilUsed), "its bias is no code"
    look(nn.ModuleList([layer])[0])
    assert type(layer) is QuantLinear
    assert set(layer.state_dict()) >= {"weight", "bias", "weight_quantizer.scale"}


def test_an_accelerator_unpacks_larger_slices_and_each_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slices: list[tuple[int, int]] = []

    class Counted(PackedWeight):
        def part(self, rows: slice) -> PackedWeight:
            slices.append((rows.stop - rows.start, self.shape[0]))
            return super().part(rows)

    monkeypatch.setattr(layers_from_codes, "ROOM_ELEMENTS", 64 * 8)
    monkeypatch.setattr(layers_from_codes, "PackedWeight", Counted)
    monkeypatch.setattr(packed_weight, "SLICE_ELEMENTS", 64)
    layer, x = from_codes(nn.Linear(8, 1024)), torch.randn(3, 8)
    expected = layer(x)
    assert [rows for rows, whole in slices if whole == 1024] == [64] * 16
    assert {rows for rows, whole in slices if whole < 1024} <= {1, 2, 4, 8}  # of a thread, by their number
    slices.clear()
    with simulated_device() as device:
        found = layer.to(device.device)(x.to(device.device))
        assert [rows for rows, whole in slices if whole == 1024] == [512, 512]
        assert {rows for rows, whole in slices if whole < 1024} == {512}
        assert torch.equal(found.cpu(), expected)
