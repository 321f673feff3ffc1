"""Sites written by hand, as the documented ``scaling_layers`` has them; conditions are a small comparison, parsed and never evaluated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.errors import ConfigError
from quark.log import get_logger
from quark.names import closest
from quark.planning.decoder_blocks import decoder_blocks
from quark_algos.mappings.mapping import LayerMapping, mappings_of
from quark_algos.mappings.resolve import resolve, submodule

__all__ = ["Condition", "Place", "check_user_mappings", "user_mappings_of"]

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
            module = submodule(block, name)
            if module is None:
                return False
            weight = getattr(module, "weight", None)
            shapes.append(weight.shape if isinstance(weight, Tensor) else None)
        return (shapes[0] == shapes[1]) is self.is_equal


@attrs.frozen
class Place:
    """A site, and when it counts."""

    site: LayerMapping
    condition: Condition | None = None

    def sites(self, block: nn.Module) -> tuple[LayerMapping, ...]:
        """What it means in a block: its site, or, where its names are only the ends of names there, one for each place that has them all.

        Documents name the projections of experts so: ``up_proj`` and ``down_proj`` are those of every expert, and of a dense MLP.
        """
        prev, first = self.site.prev, self.site.layers[0]
        if "*" in first or submodule(block, first) is not None:
            return (self.site,)
        holders = [name.removesuffix(f".{first}") for name, _ in block.named_modules() if name.endswith(f".{first}")]
        made = (
            attrs.evolve(self.site, prev=f"{holder}.{prev}", layers=tuple(f"{holder}.{layer}" for layer in self.site.layers), inspect=None)
            for holder in holders
            if submodule(block, f"{holder}.{prev}") is not None
        )
        return tuple(made) or (self.site,)


def check_user_mappings(places: Sequence[Place], model: nn.Module, facts: Architecture, heads: int) -> None:
    """Tell of places that are nowhere in a model, which changes nothing there; those that its family has may be.

    Args:
        places: Written by hand.
        model: The whole model; meta tensors will do.
        facts: About its family.
        heads: Of queries in its attention.

    Raises:
        ConfigError: None of them is in the model.
    """
    known = {(site.prev, frozenset(site.layers)) for site in mappings_of(facts)}
    own = [place for place in places if (place.site.prev, frozenset(place.site.layers)) not in known]
    blocks = [block.module for block in decoder_blocks(model, facts)] if own else []
    is_somewhere = len(own) < len(places)
    lines = []
    for place in own:
        reason = _nowhere(place, blocks, facts, heads)
        is_somewhere = is_somewhere or reason is None
        if reason is not None:
            lines.append(f"the scaling layer '{place.site.prev}' -> {', '.join(place.site.layers)} is nowhere in this model: {reason}")
    if not is_somewhere and lines:
        raise ConfigError(f"{lines[0]}; nor is any other that is named. Leave scaling_layers empty to have what the model's family has")
    for line in lines:
        get_logger(__name__).warning(f"{line}. It is left out")


def _nowhere(place: Place, blocks: Sequence[nn.Module], facts: Architecture, heads: int) -> str | None:
    """Why a place does not hold in any of these blocks; None where it does in one."""
    reason = "there are no blocks"
    for block in blocks:
        for site in place.sites(block):
            found = resolve(site, block, facts, heads)
            if not isinstance(found, str):
                return None
            reason = found
    names = {name for block in blocks for name, _ in block.named_modules()}
    missing = [name for name in (place.site.prev, *place.site.layers) if name not in names and "*" not in name]
    near = closest(missing[0], names) if missing else None
    return reason + (f"; did you mean '{near}'?" if near else "")


def user_mappings_of(scaling_layers: Sequence[Mapping[str, Any]], known: Sequence[LayerMapping]) -> tuple[Place, ...]:
    """The sites that a configuration names.

    Args:
        scaling_layers: Dicts with ``prev_op`` and ``layers``, and perhaps ``rows`` and ``condition``.
        known: Sites of the family: one with that ``prev_op`` tells what kind it is, and whatever else reads it.

    Raises:
        ConfigError: An entry lacks ``prev_op`` or ``layers``, or its condition is not understood.
    """
    return tuple(_place(entry, known) for entry in scaling_layers)


def _place(entry: Mapping[str, Any], known: Sequence[LayerMapping]) -> Place:
    prev, layers = entry.get("prev_op"), entry.get("layers")
    layers = [layers] if isinstance(layers, str) else layers
    if not isinstance(prev, str) or not layers:
        raise ConfigError(f"a scaling layer names its 'prev_op' and its 'layers': {dict(entry)!r} does not")
    condition = Condition.parse(entry["condition"]) if entry.get("condition") else None
    same = next((s for s in known if s.prev == prev and set(s.layers) & set(layers)), None)
    kind = same.kind if same else "by_module"
    rows = entry.get("rows", same.rows if same else "all")
    return Place(LayerMapping(kind, prev, tuple(layers), entry.get("module2inspect"), rows), condition)
