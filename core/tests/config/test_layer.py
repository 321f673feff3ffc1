"""Slot: its members are fields of a layer's configuration, its names those of checkpoint tensors."""

import attrs

from quark.config.layer import ACTIVATIONS, PARAMETERS, QLayerConfig, Slot
from quark.models.layers import QuantizedLayer


def test_slots_are_the_fields_that_hold_a_spec() -> None:
    assert {*Slot} == {field.name for field in attrs.fields(QLayerConfig)} - {"target_device"}
    assert {*ACTIVATIONS, *PARAMETERS} == {*Slot}


def test_quantizer_attributes_are_those_of_quantized_layers() -> None:
    assert {slot.quantizer_attribute for slot in Slot} == {n for n in QuantizedLayer.__annotations__ if n.endswith("_quantizer")}
