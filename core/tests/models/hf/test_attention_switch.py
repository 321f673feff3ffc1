"""In a model of several parts, only the part with the attention modules switches its attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from quark.models.hf.attention_switch import switch_attention


class Whole(nn.Module):
    """A model with a text part, as in transformers, which keeps the attention that it is switched to."""

    def __init__(self, *, has_parts: bool) -> None:
        super().__init__()
        text = SimpleNamespace(_attn_implementation="eager")
        self.config: Any = SimpleNamespace(
            _attn_implementation="sdpa", **({"sub_configs": {"text": None}, "text": text} if has_parts else {})
        )
        self.attention = nn.Module()
        if has_parts:
            self.attention.config = text  # type: ignore[assignment]
        self.switched: list[Any] = []

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def set_attn_implementation(self, implementation: Any) -> None:
        self.switched.append(implementation)


@pytest.mark.parametrize(("has_parts", "expected"), [(True, {"text": "quark_eager"}), (False, "quark_sdpa")])
def test_switch_attention_sets_the_implementation_of_the_modules_part_or_of_the_model(has_parts: bool, expected: Any) -> None:
    model = Whole(has_parts=has_parts)
    switch_attention(model, ["attention"], eager=False)
    assert model.switched == [expected]
