"""Padding: a token that the mask of its call leaves out reaches no statistic, and no other token is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.algorithms import BlockContext, Metrics, RoundingTask, RoundToNearest, Transform
from quark.calibration.batches import calls
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark.runs.quantize_block import quantize_blocks
from quark.runs.sink import InPlaceSink
from quark.torch import LLMTemplate

from ..hand_made_runs import hand_made_run
from .inputs import Inputs

PAD = 7
FIRST = "self_attn.q_proj"
# Calls of one shape whose masks differ, so that a mask of another call would fit each of them; the last has
# no padding.
IDS = torch.arange(20, 56).reshape(3, 2, 6)
MASKS = torch.ones_like(IDS)
MASKS[0, 1, 4:] = 0
MASKS[1, 0, :3] = 0
IDS[MASKS == 0] = PAD


class Spy(RoundToNearest):
    """Rounds to nearest, and keeps the inputs of each layer that it receives."""

    needs = (Inputs,)

    def __init__(self) -> None:
        self.shown: dict[str, list[Tensor]] = {}

    def applies_to(self, name: str) -> bool:
        return True

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        self.shown |= {name: task.statistic(Inputs).seen for name in task.layers}
        super().round(task)
        return {name: {} for name in task.layers}


class Watching(Transform):
    """A transform that changes nothing and keeps the inputs of the first block that it receives."""

    needs = (Inputs,)

    def __init__(self) -> None:
        self.shown: list[Tensor] = []

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        if block.name == "model.layers.0":
            self.shown = block.statistics[FIRST][Inputs].seen  # type: ignore[attr-defined]
        return {}


def run_with(rounding: Any, *transforms: Any, **options: Any) -> nn.Module:
    model = tiny.tiny_model()
    plan = make_plan(model, LLMTemplate.get("llama").get_config(scheme="int4_wo_32"), architecture_of(model))
    data = [{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(IDS, MASKS, strict=True)]
    quantize_blocks(hand_made_run(model, plan, calls(data), rounding, *transforms, **options), InPlaceSink(model))
    return model


def ids_of(seen: list[Tensor]) -> list[int]:
    """Return the token ids of inputs of the first layer.

    These inputs are normed embeddings, which depend only on the id.
    """
    model = tiny.tiny_model()
    with torch.no_grad():
        table = model.model.layers[0].input_layernorm(model.model.embed_tokens.weight)
    distances = torch.cdist(torch.cat(seen), table)
    assert distances.amin(1).max() < 1e-3 * distances.amax()
    return distances.argmin(1).tolist()


@pytest.mark.parametrize("two_passes", [False, True])
def test_a_rounding_is_shown_all_tokens_but_those_that_their_own_mask_leaves_out(two_passes: bool) -> None:
    spy = Spy()
    run_with(spy, two_passes=two_passes)
    assert ids_of(spy.shown[f"model.layers.0.{FIRST}"]) == IDS[MASKS == 1].tolist()
    tokens = {name: sum(len(x) for x in seen) for name, seen in spy.shown.items()}
    assert set(tokens.values()) == {int(MASKS.sum())}, "in every layer of every block"


def test_a_transform_is_shown_no_token_that_its_own_mask_leaves_out() -> None:
    transform = Watching()
    run_with(RoundToNearest(), transform)
    found = ids_of(transform.shown)
    assert PAD not in found
    # The other tokens are there once, but for those that are held out to judge by.
    real = IDS[MASKS == 1].tolist()
    assert found == [token for token in real if token in set(found)]
    assert len(found) > len(real) // 2
