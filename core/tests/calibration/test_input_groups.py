"""Input groups: layers that are called with the same tensor object are one group.

The groups of a block are expected in the next block.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from quark.calibration.input_groups import InputGroups
from quark.config.architecture import Architecture

X, Y = torch.ones(2, 3), torch.ones(2, 3)
FORWARD: Any = object()
OTHER: Any = object()


def test_layers_called_with_one_tensor_have_one_leader_and_the_tensor_is_new_once() -> None:
    groups = InputGroups()
    assert groups.observe({FORWARD: X}, "q") == ("q", True)
    assert groups.observe({FORWARD: X}, "k") == ("q", False)
    assert groups.observe({FORWARD: Y}, "o") == ("o", True), "equal values are not one tensor"


@pytest.mark.parametrize(("inputs", "spec"), [({OTHER: X}, None), ({FORWARD: X, OTHER: X}, None), ({FORWARD: X}, "fp8")])
def test_another_forward_or_another_spec_is_another_group(inputs: Any, spec: object) -> None:
    groups = InputGroups()
    groups.observe({FORWARD: X}, "q")
    assert groups.observe(inputs, "k", spec=spec) == ("k", True)


def test_the_next_forward_of_a_group_is_new_to_it() -> None:
    groups = InputGroups()
    for forward, x in ((FORWARD, X), (OTHER, Y)):
        assert groups.observe({forward: x}, "q") == ("q", True)
        assert groups.observe({forward: x}, "k") == ("q", False)


def test_a_layer_stays_in_the_group_in_which_it_was_first_seen() -> None:
    groups = InputGroups()
    groups.observe({FORWARD: X}, "gate")
    groups.observe({FORWARD: Y}, "q")
    assert groups.observe({FORWARD: Y}, "gate") == ("gate", True)


def test_what_a_block_has_shown_is_expected_of_the_next() -> None:
    groups = InputGroups()
    for name in ("q", "k", "v"):
        groups.observe({FORWARD: X}, name)
    assert groups.expected(["q", "k", "v", "o"]) == dict.fromkeys(("q", "k", "v"), ("q", "k", "v"))
    groups.end_block()
    assert groups.observe({FORWARD: X}, "v") == ("v", True), "tensors of the block before are forgotten"


def test_layers_that_are_known_to_read_along_belong_to_what_is_learned() -> None:
    groups = InputGroups()
    groups.observe({FORWARD: X}, "q", "k")
    groups.observe({FORWARD: X}, "v")
    assert groups.expected(["k", "v", "q"])["k"] == ("k", "v", "q")


def test_the_architecture_and_names_of_siblings_state_groups() -> None:
    facts = Architecture(model_type="x", attention_inputs=("a.q", "a.k"), fused=(("gate", "up"),))
    names = ["a.q", "a.k", "a.o", "m.gate", "m.up", "m.s", "m.t"]
    assert InputGroups(facts, [("s", "t")]).expected(names) == (
        dict.fromkeys(names[:2], ("a.q", "a.k")) | dict.fromkeys(names[3:5], ("m.gate", "m.up")) | dict.fromkeys(names[5:], ("m.s", "m.t"))
    )
    parallel = Architecture(model_type="x", attention_inputs=("q",), mlp_inputs=("up",), attention_norm="norm", mlp_norm="norm")
    assert InputGroups(parallel).expected(["q", "up"])["q"] == ("q", "up"), "both read one norm"


def test_what_was_learned_goes_through_json_to_another_process() -> None:
    groups, resumed = InputGroups(), InputGroups()
    for name in ("q", "k", "v"):
        groups.observe({FORWARD: X}, name)
    resumed.recall(json.loads(json.dumps(groups.learned())))
    names = ["q", "k", "v", "o"]
    assert resumed.expected(names) == groups.expected(names) != {}
    resumed.recall([])
    assert resumed.expected(names) == {}
