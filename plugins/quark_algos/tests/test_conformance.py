"""Every algorithm and selector that this distribution registers passes the conformance suite."""

import pytest

from quark_algos.plugin import quark_register_algorithms, quark_register_selectors
from quark_devkit import BlockTuningConformance, RoundingConformance, SelectorConformance, TransformConformance

_BASES = {"rounding": RoundingConformance, "transform": TransformConformance, "block_tuning": BlockTuningConformance}
# Its published steps take minutes over all checks.
_MARKS = {"autoround": {"pytestmark": pytest.mark.slow}}
globals().update(
    {
        f"Test_{r.name}": type(f"Test_{r.name}", (_BASES[r.kind],), {"subject": r.name, **_MARKS.get(r.name, {})})
        for r in quark_register_algorithms()
    }
)
globals().update(
    {f"Test_{r.name}": type(f"Test_{r.name}", (SelectorConformance,), {"subject": r.name}) for r in quark_register_selectors()}
)
