"""Simulate another system in this process. Python imports this module at its start if ``PYTHONPATH`` has this folder."""

from __future__ import annotations

import os

if system := os.environ.get("QUARK_OTHER_SYSTEM"):
    from simulated_system import install

    install(system)
