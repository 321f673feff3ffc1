"""Every algorithm that this distribution registers passes the conformance suite."""

import pytest

from quark_algos.plugin import quark_register_algorithms
from quark_devkit import BlockTuningConformance, RoundingConformance, TransformConformance

_BASES = {"rounding": RoundingConformance, "transform": TransformConformance, "block_tuning": BlockTuningConformance}
# The published steps of AutoRound take minutes over all checks. Qronos is GPTQ and the correction of GPTAQ,
# AWQ searches as AutoSmoothQuant does and moves scale as SmoothQuant does: whole runs are made with these
# two.
_MARKS = {"autoround": {"pytestmark": pytest.mark.slow}} | {
    name: {"pytestmark": pytest.mark.slow_runs} for name in ("gptq", "gptaq", "smoothquant", "autosmoothquant")
}
globals().update(
    {
        f"Test_{r.name}": type(f"Test_{r.name}", (_BASES[r.kind],), {"subject": r.name, **_MARKS.get(r.name, {})})
        for r in quark_register_algorithms()
    }
)
