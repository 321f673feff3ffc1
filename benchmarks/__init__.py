"""Benchmarks of speed, memory and accuracy.

Most figures are ratios to a floor, which is measured in the same run. The bar of a figure is the largest
allowed value.

`make bench` runs those benchmarks that need neither ``--model`` nor ``--text``.

OpenMP threads that wait for each other spin briefly and then sleep, as in the ``quark`` program. Set
``OMP_WAIT_POLICY`` to change this.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
