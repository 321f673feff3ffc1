"""Every algorithm that this distribution registers passes the conformance suite."""

import pytest

from quark_algos.plugin import quark_register_algorithms
from quark_devkit import BlockTuningConformance, BranchConformance, RoundingConformance, TransformConformance

_BASES = {
    "rounding": RoundingConformance,
    "transform": TransformConformance,
    "block_tuning": BlockTuningConformance,
    "branch": BranchConformance,
}
# The published steps of AutoRound take minutes over all checks. Qronos is GPTQ and the correction of GPTAQ,
# AWQ searches as AutoSmoothQuant does and moves scale as SmoothQuant does: whole runs are made with these
# two. Runs of all on an accelerator have more asked of them in tests/test_on_an_accelerator.py: the bits.
_MARKS = {
    "autoround": pytest.mark.slow,
    "tuning": pytest.mark.slow_runs("works_on_an_accelerator", "tunes_every_format", "heeds_its_options"),  # its own tests do
    **dict.fromkeys(("gptq", "gptaq", "smoothquant", "autosmoothquant"), pytest.mark.slow_runs),
}
_ON_AN_ACCELERATOR = pytest.mark.slow_runs("works_on_an_accelerator")
globals().update(
    {
        f"Test_{r.name}": type(
            f"Test_{r.name}", (_BASES[r.kind],), {"subject": r.name, "pytestmark": _MARKS.get(r.name, _ON_AN_ACCELERATOR)}
        )
        for r in quark_register_algorithms()
    }
)
