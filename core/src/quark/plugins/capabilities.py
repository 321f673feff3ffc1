"""Capabilities: what a record may say of itself beyond its fields, as plain strings.

`CAPABILITIES` are those that this project gives a meaning. A plugin may declare others, for programs of its
vendor that look for them, as ``"vendor.capability"``: they are listed like the rest, and nothing here acts on
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from quark.base.names import closest, is_vendor_name

__all__ = ["CAPABILITIES", "unknown_capability"]

CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "calibration": "algorithms: it measures the inputs of layers, so a run needs calibration data",
        "graphs": "exporters: it writes models quantized in FX graph mode, which have operators in the place of layers",
        "resumable": "exporters: a run that was killed goes on from the decoder blocks that it has written",
        "rounds_scales": "exporters: it stores scales in another form than that in which they were found, which rounds some of them",
        "streaming": "exporters: it writes one decoder block at a time, so the model need not fit in memory",
        "tokenizer_inside": "exporters: it writes the tokenizer into its own file, and not beside the weights",
        "zero_point": "formats: it has zero points, so a range may be asymmetric",
    }
)
"""The capabilities without a vendor's prefix: the kind of record that has each, and what it means."""


def unknown_capability(names: Iterable[object]) -> str | None:
    """Say which of the names is no capability, and which are; None where all are.

    >>> unknown_capability(["streaming", "acme.sparse"])
    >>> unknown_capability(["steaming"]).partition(" There are")[0]
    "'steaming' is no capability; did you mean 'streaming'?"
    """
    unknown = next((name for name in names if name not in CAPABILITIES and not is_vendor_name(name)), None)
    if unknown is None:
        return None
    near = closest(str(unknown), CAPABILITIES)
    suggestion = f"; did you mean {near!r}?" if near else "."
    return f"{unknown!r} is no capability{suggestion} There are {', '.join(CAPABILITIES)}, and a vendor's own, 'vendor.name'"
