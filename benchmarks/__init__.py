"""Benchmarks: ratios to a floor measured in the same run.

`make bench` runs the benchmarks that need only this repository.

As in the ``quark`` program, OpenMP threads that wait for each other soon sleep, unless you set
``OMP_WAIT_POLICY``.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
