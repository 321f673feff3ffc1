"""Benchmarks: ratios to a floor measured in the same run.

`make bench` runs those that need nothing but this repository.

OpenMP threads soon sleep when they wait for each other, as in the ``quark`` program, unless the environment
sets ``OMP_WAIT_POLICY``.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
