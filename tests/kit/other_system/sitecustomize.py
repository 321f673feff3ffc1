"""Python imports this module when it starts, where its folder is on ``PYTHONPATH``: the process then sees another system."""

from __future__ import annotations

import os

if system := os.environ.get("QUARK_OTHER_SYSTEM"):
    from simulated_system import install

    install(system)
