"""Sites written by hand, as the documented ``scaling_layers`` has them; conditions are a small comparison, parsed and never evaluated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

from quark.errors import ConfigError
from quark_algos.sites import Site

_SIDE = r"module\.([A-Za-z_][\w.]*)\.weight\.shape"
_CONDITION = re.compile(rf"\s*{_SIDE}\s*(==|!=)\s*{_SIDE}\s*")


@attrs.frozen
class Condition:
    """Whether the weights of two modules of a block have the same shape, or have not.

    >>> Condition.parse("module.self_attn.v_proj.weight.shape == module.self_attn.o_proj.weight.shape").left
    'self_attn.v_proj'
    """

    left: str
    right: str
    is_equal: bool

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read the documented form; raises ConfigError for anything else."""
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"the condition {text!r} of a scaling layer is not understood: write "
                "'module.A.weight.shape == module.B.weight.shape', or !=, with names relative to a decoder block"
            )
        left, operator, right = found.groups()
        return cls(left, right, operator == "==")

    def holds(self, block: nn.Module) -> bool:
        """For that block; False where it lacks one of the modules."""
        shapes = []
        for name in (self.left, self.right):
            try:
                weight = getattr(block.get_submodule(name), "weight", None)
            except AttributeError:
                return False
            shapes.append(weight.shape if isinstance(weight, Tensor) else None)
        return (shapes[0] == shapes[1]) is self.is_equal


@attrs.frozen
class Place:
    """A site, and when it counts."""

    site: Site
    condition: Condition | None = None


def places_of(scaling_layers: Sequence[Mapping[str, Any]], known: Sequence[Site]) -> tuple[Place, ...]:
    """The sites that a configuration names.

    Args:
        scaling_layers: Dicts with ``prev_op`` and ``layers``, and perhaps ``rows`` and ``condition``.
        known: Sites of the family: one with that ``prev_op`` tells what kind it is, and whatever else reads it.

    Raises:
        ConfigError: An entry lacks ``prev_op`` or ``layers``, or its condition is not understood.
    """
    return tuple(_place(entry, known) for entry in scaling_layers)


def _place(entry: Mapping[str, Any], known: Sequence[Site]) -> Place:
    prev, layers = entry.get("prev_op"), entry.get("layers")
    if not isinstance(prev, str) or not layers:
        raise ConfigError(f"a scaling layer names its 'prev_op' and its 'layers': {dict(entry)!r} does not")
    condition = Condition.parse(entry["condition"]) if entry.get("condition") else None
    same = next((s for s in known if s.prev == prev and set(s.layers) & set(layers)), None)
    kind = same.kind if same else "norm" if "norm" in prev.lower() or "ln_" in prev else "value"
    rows = entry.get("rows", same.rows if same else "all")
    return Place(Site(kind, prev, tuple(layers), entry.get("module2inspect"), rows), condition)
