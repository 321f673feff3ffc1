"""User mappings: the mappings that a user defines in ``scaling_layers``, in the format of AMD Quark.

The module also writes notes on mappings that do not apply to a model. A mapping may have a condition, which
compares two shapes. The condition is parsed and is never evaluated as code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from quark.base.log import get_logger
from quark.base.names import closest
from quark.config.architecture import Architecture
from quark.errors import ConfigError
from quark.models.plan.decoder_blocks import decoder_blocks
from quark_algos.mappings.mapping import LayerMapping, mappings_of
from quark_algos.mappings.resolve import resolve, submodule

__all__ = ["Condition", "UserMapping", "check_user_mappings", "skipped_mappings", "user_mappings_of"]


_SIDE = r"module\.([A-Za-z_][\w.]*)\.weight\.shape"
_CONDITION = re.compile(rf"\s*{_SIDE}\s*(==|!=)\s*{_SIDE}\s*")


@attrs.frozen
class Condition:
    """A condition of a mapping: the weights of two modules of a block must have the same shape, or different
    shapes.

    >>> Condition.parse("module.self_attn.v_proj.weight.shape == module.self_attn.o_proj.weight.shape").left
    'self_attn.v_proj'
    """

    left: str
    right: str
    is_equal: bool

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition, and return it. Raise ConfigError if ``text`` does not have the form of a
        condition.
        """
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"the condition {text!r} of a scaling layer has a wrong form. Write "
                "'module.A.weight.shape == module.B.weight.shape', or !=, with names relative to a decoder block"
            )
        left, operator, right = match.groups()
        return cls(left, right, operator == "==")

    def holds(self, block: nn.Module) -> bool:
        """Return whether the condition is true in a block. If a module is missing in the block, return
        False.
        """
        modules = [submodule(block, name) for name in (self.left, self.right)]
        if None in modules:
            return False
        left, right = (getattr(getattr(module, "weight", None), "shape", None) for module in modules)
        return (left == right) is self.is_equal


@attrs.frozen
class UserMapping:
    """A mapping that a configuration defines, and the condition under which the mapping is used.

    Attributes:
        mapping: The mapping. The names in the mapping may be only the last parts of names in a block.
        condition: The condition. If it is None, the mapping is used in every block.
    """

    mapping: LayerMapping
    condition: Condition | None = None

    def mappings_in(self, block: nn.Module) -> tuple[LayerMapping, ...]:
        """Return the mappings in a block, with names relative to the block.

        If the names of the mapping are names in the block, the result has only this mapping. If they are only
        the last parts of names, the result has one mapping for each module of the block that contains all
        these layers. AMD Quark's documentation uses such names for experts: ``up_proj`` and ``down_proj``
        match the projections of every expert, and also the projections of a dense MLP.
        """
        smooth_layer, first = self.mapping.smooth_layer, self.mapping.balance_layers[0]
        if "*" in first or submodule(block, first) is not None:
            return (self.mapping,)
        holders = [name.removesuffix(f".{first}") for name, _ in block.named_modules() if name.endswith(f".{first}")]
        mappings = tuple(
            attrs.evolve(
                self.mapping,
                smooth_layer=f"{holder}.{smooth_layer}",
                balance_layers=tuple(f"{holder}.{layer}" for layer in self.mapping.balance_layers),
                inspect=None,
            )
            for holder in holders
            if submodule(block, f"{holder}.{smooth_layer}") is not None
        )
        return mappings or (self.mapping,)


def check_user_mappings(mappings: Sequence[UserMapping], model: nn.Module, facts: Architecture, heads: int) -> None:
    """Log a warning for each user mapping that applies to no block of a model.

    There is no warning if such a mapping is also a mapping of the architecture.

    Args:
        mappings: The user mappings.
        model: The whole model. Its tensors may be on the meta device.
        facts: Architecture of the model.
        heads: Number of query heads of the model's attention.

    Raises:
        ConfigError: None of the mappings applies to any block.
    """
    known = {(mapping.smooth_layer, frozenset(mapping.balance_layers)) for mapping in mappings_of(facts)}
    own = [entry for entry in mappings if (entry.mapping.smooth_layer, frozenset(entry.mapping.balance_layers)) not in known]
    blocks = [block.module for block in decoder_blocks(model, facts)] if own else []
    is_somewhere = len(own) < len(mappings)
    lines = []
    for entry in own:
        reason = _why_nowhere(entry, blocks, facts, heads)
        is_somewhere = is_somewhere or reason is None
        if reason is not None:
            names = f"'{entry.mapping.smooth_layer}' -> {', '.join(entry.mapping.balance_layers)}"
            lines.append(f"the scaling layer {names} does not exist in this model: {reason}")
    if not is_somewhere and lines:
        raise ConfigError(
            f"{lines[0]}, and no other entry applies. Leave scaling_layers empty to use the mappings of the model's architecture"
        )
    for line in lines:
        get_logger(__name__).warning(f"{line}. It is skipped")


def _why_nowhere(entry: UserMapping, blocks: Sequence[nn.Module], facts: Architecture, heads: int) -> str | None:
    """Return why a mapping applies to no block, or None if it applies to a block."""
    reason = "there are no blocks"
    for block in blocks:
        for mapping in entry.mappings_in(block):
            resolved = resolve(mapping, block, facts, heads)
            if not isinstance(resolved, str):
                return None
            reason = resolved
    names = {name for block in blocks for name, _ in block.named_modules()}
    missing = [name for name in (entry.mapping.smooth_layer, *entry.mapping.balance_layers) if name not in names and "*" not in name]
    near = closest(missing[0], names) if missing else None
    return reason + (f"; did you mean '{near}'?" if near else "")


def user_mappings_of(scaling_layers: Sequence[Mapping[str, Any]], known: Sequence[LayerMapping]) -> tuple[UserMapping, ...]:
    """Return the mappings that a configuration names.

    Args:
        scaling_layers: Dicts with ``prev_op`` and ``layers``, and optionally ``rows`` and ``condition``.
        known: The mappings of the architecture. If one of them has the same ``prev_op`` as an entry, the
            entry gets the kind and the rows of that mapping.

    Raises:
        ConfigError: An entry has no ``prev_op`` or no ``layers``, or the condition of an entry has a wrong
            form.
    """
    return tuple(_user_mapping(entry, known) for entry in scaling_layers)


def _user_mapping(entry: Mapping[str, Any], known: Sequence[LayerMapping]) -> UserMapping:
    prev_op, layers = entry.get("prev_op"), entry.get("layers")
    layers = [layers] if isinstance(layers, str) else layers
    if not isinstance(prev_op, str) or not layers:
        raise ConfigError(f"a scaling layer needs 'prev_op' and 'layers'. Add them to {dict(entry)!r}")
    condition = Condition.parse(entry["condition"]) if entry.get("condition") else None
    same = next((m for m in known if m.smooth_layer == prev_op and set(m.balance_layers) & set(layers)), None)
    kind = same.kind if same else "by_module"
    rows = entry.get("rows", same.rows if same else "all")
    return UserMapping(LayerMapping(kind, prev_op, tuple(layers), entry.get("module2inspect"), rows), condition)


def skipped_mappings(mappings: Sequence[UserMapping], model: nn.Module, facts: Architecture, heads: int) -> tuple[str, ...]:
    """Return notes for the plan about mappings that do not apply to some blocks.

    If a mapping does not apply for several reasons, there is one note per reason.

    Args:
        mappings: The mappings of the configuration, or all mappings of the architecture.
        model: The whole model. Its tensors may be on the meta device.
        facts: Architecture of the model.
        heads: Number of query heads of the model's attention.
    """
    blocks = [block.module for block in decoder_blocks(model, facts)]
    lines = []
    for entry in mappings:
        reasons = Counter(reason for block in blocks if (reason := _reason(entry, block, facts, heads)) is not None)
        subject = f"no scale is moved from '{entry.mapping.smooth_layer}' to {', '.join(entry.mapping.balance_layers)}"
        for reason, count in reasons.items():
            where = "every block" if count == len(blocks) else f"{count} of {len(blocks)} blocks"
            lines.append(f"{subject} in {where}: {reason}")
    return tuple(lines)


def _reason(entry: UserMapping, block: nn.Module, facts: Architecture, heads: int) -> str | None:
    """Return why a mapping does not apply to a block, or None if the mapping applies."""
    resolved = [resolve(mapping, block, facts, heads) for mapping in entry.mappings_in(block)]
    reason = next((one for one in resolved if isinstance(one, str)), None)
    if reason is None and entry.condition is not None and not entry.condition.holds(block):
        return "its condition does not hold"
    return reason
