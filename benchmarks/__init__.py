"""Benchmarks: ratios to a floor measured in the same run. `make bench` runs those that need nothing but this repository.

OpenMP threads sleep while they wait for each other, as in the ``quark`` program, unless the environment sets ``OMP_WAIT_POLICY``.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
