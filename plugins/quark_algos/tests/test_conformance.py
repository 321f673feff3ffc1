"""Every algorithm that this distribution registers passes the conformance suite."""

from quark.testing import RoundingConformance, TransformConformance
from quark_algos.plugin import quark_register_algorithms

_BASES = {"rounding": RoundingConformance, "transform": TransformConformance}
globals().update({f"Test_{r.name}": type(f"Test_{r.name}", (_BASES[r.kind],), {"subject": r.name}) for r in quark_register_algorithms()})
